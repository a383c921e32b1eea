"""Measures the sensitivity of the gradient to each saved tensor by disturbing it, and allocates bits by that.

GACT (arXiv 2206.11357, section 4) runs three forward and backward passes for each tensor. Here one forward pass on a
few samples is kept, and its backward pass runs once for each group of tensors, which are packed a second time, to two
bits. A group is consecutive tensors of one kind; there are at most as many groups as asked. For BERT-large that is 65
backward passes on 8 samples in place of some 1,500 forward and backward passes.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from actbench.methods.actnn.solver import all_spent
from actbench.ops import noise
from actbench.packing import SiteState
from actbench.packing.copies import buffers_kept, copied, is_cache, is_empty
from actbench.packing.graphs import is_reentrant
from actbench.packing.hooked.hooks import PROBE_BITS, Hooks
from actbench.packing.packer import own_tensors

WIDTHS = (1, 2, 4, 8)
KEPT_BITS = 4
"""The least bits of a tensor in the probed pass: a tensor of two bits would be packed to two bits exactly."""

Run = Callable[..., Any]


class Probing:
    """Allocates bits to a model's saved tensors, every ``interval`` forward passes in training.

    Args:
        average_bits: Average bits of an element.
        interval: Forward passes from one allocation to the next; the first is before the first pass.
        samples: Rows of the batch to use, if all inputs have equally many rows.
        groups: The most groups of tensors to disturb, but at least one of each kind.

    Attributes:
        passes: How many forward passes were counted, by the path of the module where they begin.
    """

    def __init__(self, average_bits: float, interval: int, samples: int = 8, groups: int = 64) -> None:
        self.average_bits, self.interval, self.samples, self.groups = average_bits, interval, samples, groups
        self.passes: Counter[str] = Counter()

    def restarted(self) -> Probing:
        """Return a new object with these settings that has counted no pass."""
        return Probing(self.average_bits, self.interval, self.samples, self.groups)

    def is_due(self, entry: str = "") -> bool:
        """Count a pass that begins at a module, and return whether an allocation is due before it."""
        self.passes[entry] += 1
        return (self.passes[entry] - 1) % self.interval == 0

    def step(self, hooks: Hooks, module: nn.Module, run: Run, args: Any, kwargs: Any, entry: str = "") -> None:
        """Count a forward pass, and allocate bits before it if this is due.

        Args:
            hooks: The hooks that pack.
            module: The module where the pass begins.
            run: Runs the module under the hooks.
            args: The arguments of the pass.
            kwargs: The named arguments of the pass.
            entry: Path of the module in the model; empty for the model itself.
        """
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return
        if not any(parameter.requires_grad for parameter in module.parameters()) or not self.is_due(entry):
            return
        args, kwargs = _rows((args, kwargs), self.samples)
        # the model's own code need not take fewer rows, and training goes on without an allocation
        try:
            self.allocate(hooks, module, lambda: _scalar(run(module, *args, **kwargs)))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            warnings.warn(
                f"gact leaves the bits of its tensors unchanged: the pass that allocates them failed ({error}); "
                "use auto_prec=false, or actbench.Controller with a loss of your own",
                stacklevel=2,
            )

    def allocate(self, hooks: Hooks, module: nn.Module, loss_of: Callable[[], Tensor]) -> None:
        """Allocate bits; gradients, buffers and random numbers do not change.

        Other effects of the model's own code and its users' hooks, such as counting, do happen. A model that uses
        torch's re-entrant checkpointing keeps its bits: only ``backward()`` can differentiate what this recomputes.

        Args:
            hooks: The hooks that pack; their sites get new bits.
            module: The model.
            loss_of: Runs the model under the hooks and returns a scalar.
        """
        with ExitStack() as stack:
            stack.enter_context(_random_numbers_kept(module))
            stack.enter_context(buffers_kept(module))
            stack.enter_context(torch.enable_grad())
            # Hooks outside see nothing of this pass. Detached: a node that saves its own output is never freed.
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))
            hooks.probing = True
            stack.callback(setattr, hooks, "probing", False)
            stack.callback(setattr, hooks, "disturbed", frozenset())
            stack.enter_context(_at_least(KEPT_BITS, hooks))
            hooks.forget_seen()
            loss = loss_of()
            if is_reentrant(loss):
                _warn_of_recomputation()
                return
            chosen = _shared_out(self, hooks, module, loss)
        # after the stack, which gives all sites their earlier bits back
        for site, bits in chosen:
            site.bits = bits


@contextmanager
def _random_numbers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy after the block."""
    # without a list fork_rng saves the state of all cards, and warns where there are many (torch/random.py)
    devices = {tensor.device for tensor in own_tensors(module) if tensor.is_cuda}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@functools.cache
def _warn_of_recomputation() -> None:
    warnings.warn(
        "gact gives all tensors the same bits: the model recomputes blocks by torch's re-entrant checkpointing, which "
        "refuses the gradients that the allocation of bits needs; use gact:L2+checkpoint, or use_reentrant=False",
        stacklevel=2,
    )


@contextmanager
def _at_least(bits: float, hooks: Hooks) -> Iterator[None]:
    """Give all sites at least these bits; sites that are made meanwhile get the usual bits afterwards."""
    usual, before = hooks.bits, {site: site.bits for site in hooks.all_sites()}
    hooks.give_new_sites(max(bits, usual))
    for site in before:
        site.bits = max(bits, site.bits)
    try:
        yield
    finally:
        hooks.give_new_sites(usual)
        for site in hooks.all_sites():
            site.bits = before.get(site, usual)


def _shared_out(probing: Probing, hooks: Hooks, module: nn.Module, loss: Tensor) -> list[tuple[SiteState, float]]:
    """Return the bits of each site that the loss saved something for."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = list(_groups(hooks.seen(), probing.groups))

    def gradient() -> list[Tensor | None]:
        # one graph is run backward for every group; a parameter may have no part in the loss
        return list(torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True))

    exact = gradient()
    costs, weights = [], []
    for group in groups:
        hooks.disturbed = frozenset(group)
        # from the disturbance at PROBE_BITS to that at one bit, which the solver expects
        costs.append(_squared_distance(gradient(), exact) * (2**PROBE_BITS - 1) ** 2)
        weights.append(sum(site.elements for site in group))
    widths = all_spent(costs, weights, probing.average_bits * sum(weights), WIDTHS)
    return [(site, bits) for group, bits in zip(groups, widths, strict=True) for site in group]


def _groups(kinds: Sequence[list[SiteState]], most: int) -> Iterator[list[SiteState]]:
    """Cut the sites of each kind into consecutive groups, as many as the kind's share of all elements allows."""
    # a site that shares a tensor is disturbed with the one that packed it
    own = [[site for site in sites if site.owner is None and site.elements] for sites in kinds]
    own = [sites for sites in own if sites]
    total = sum(site.elements for sites in own for site in sites)
    spare = max(0, most - len(own))
    for sites in own:
        share = sum(site.elements for site in sites) / total
        pieces = min(len(sites), 1 + int(spare * share))
        for piece in range(pieces):
            yield sites[len(sites) * piece // pieces : len(sites) * (piece + 1) // pieces]


def _squared_distance(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
    # the parameters of one model may lie on several devices
    return float(sum((a.float() - b.float()).square().sum().cpu() for a, b in pairs))


def _rows(inputs: Any, samples: int) -> Any:
    """Return the first rows of all inputs without their graphs, or all rows if the inputs are not of one batch.

    Scalars, such as the number of items that a trainer passes, are not cut. A cache of keys and values is copied, since
    the pass may fill it; with a filled cache no rows are cut.
    """
    leaves = tree_leaves(inputs)
    heights = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    filled = any(is_cache(leaf) and not is_empty(leaf) for leaf in leaves)
    last = samples if len(heights) == 1 and max(heights) > samples and not filled else None

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copied(leaf)
        found = leaf.detach()[:last] if last and leaf.dim() else leaf.detach()
        # operators of which no input needs a gradient save nothing, and so would not be seen
        return found.requires_grad_(leaf.requires_grad)

    return tree_map(cut, inputs)


def _scalar(output: Any) -> Tensor:
    """Return the loss that a model returns, or a random combination of all that it returns."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    # a plain sum has no gradient behind a softmax or a norm; and no random numbers are drawn
    signs = [noise.lanes(index, 0, result.numel(), 1, result.device) * 2 - 1 for index, result in enumerate(results)]
    return torch.stack([(r.float().flatten() * s).sum() for r, s in zip(results, signs, strict=True)]).sum()
