"""Fused attention whose query, key and value are packed.

Torch's backward pass recomputes the probabilities from query and key, and scales them by a saved logarithm of a sum of
exact scores: with decoded query and key the probabilities would grow without bound. So only the three inputs are
packed, and the backward pass runs the whole operator again on the decoded inputs. The mask stays whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from actbench.ops.library import traced
from actbench.packing import Packed, SavedTensors, SiteState, savedtensors
from actbench.packing.codecs import Unpacked
from actbench.packing.hooked.oprules import all_stays_whole
from actbench.packing.refusals import first_order
from actbench.packing.wrapped import Rules

Options = dict[str, Any]


class Packs(Protocol):
    """What fused attention needs of the hooks that it runs under."""

    packer: SavedTensors
    rules: Rules

    def pack_at_site(self, tensor: Tensor) -> tuple[Packed, SiteState]:
        """Pack a tensor."""

    def restored(self, packed: Packed, site: SiteState) -> Tensor:
        """Return the decoded tensor of a site."""


class FusedAttention(torch.autograd.Function):
    """``F.scaled_dot_product_attention``, run a second time in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, hooks: Packs, options: Options
    ) -> Tensor:
        """Return what the operator returns."""
        saved = [hooks.pack_at_site(tensor) for tensor in (query, key, value)]
        if mask is not None:
            savedtensors.left(mask, "the mask of attention, which stays whole")
            hooks.packer.exclude.add([mask])
        for packed, _ in saved:
            if not isinstance(packed.codec, Unpacked):
                hooks.packer.exclude.add(packed.parts)  # saved below, where the hooks see them
        ctx.hooks, ctx.options, ctx.around = hooks, options, _Surroundings(query, options["dropout_p"])
        ctx.saved = [(packed._replace(parts=()), site, len(packed.parts)) for packed, site in saved]
        ctx.save_for_backward(mask, *(part for packed, _ in saved for part in packed.parts))
        # A graph changes torch's choice of operator; no backward pass runs through this one, so that it saves nothing.
        with saved_tensors_hooks(_nothing, _nothing), torch.enable_grad():
            return _attend(_inputs([query, key, value, mask], ctx.needs_input_grad), options).detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operator on the decoded inputs."""
        mask, *parts = ctx.saved_tensors
        restored: list[Tensor | None] = []
        for packed, site, count in ctx.saved:
            restored.append(ctx.hooks.restored(packed._replace(parts=tuple(parts[:count])), site))
            parts = parts[count:]
        inputs = _inputs([*restored, mask], ctx.needs_input_grad)
        with torch.enable_grad(), ctx.around.again():
            output = _attend(inputs, ctx.options)
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad))
        return *(next(found) if x is not None and x.requires_grad else None for x in inputs), None, None


def attention_rules(hooks: Packs) -> Rules:
    """Return rules for :class:`~actbench.packing.wrapped.Intercepted` under which hooks pack fused attention.

    Operators inside torch's own attention layers are intercepted too: the layers' function runs with replaced names.
    """
    attend: Any = F.scaled_dot_product_attention
    layers = F.multi_head_attention_forward
    rule = partial(fused_attention, hooks)
    inside = {**vars(F), attend.__name__: rule, "dropout": hooks.rules.get(F.dropout, F.dropout)}
    # a copy with names of its own: torch's function stays as it is for other models and threads
    seen = types.FunctionType(layers.__code__, inside, layers.__name__, layers.__defaults__, layers.__closure__)
    rules: dict[Callable[..., Any], Callable[..., Any]] = {attend: rule, layers: seen}
    return rules


def fused_attention(
    hooks: Packs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Return ``F.scaled_dot_product_attention`` of these arguments; its inputs are packed."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, **more}
    graph = any(tensor is not None and tensor.requires_grad for tensor in (query, key, value, attn_mask))
    if not (graph and torch.is_grad_enabled()):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if dropout_p and traced():  # a graph would draw other numbers in the second run
        with all_stays_whole():
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    output: Tensor = FusedAttention.apply(query, key, value, attn_mask, hooks, options)
    return output


def _inputs(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the tensors without their graphs; tensors whose gradient is wanted become leaves."""
    return [
        None if tensor is None else tensor.detach().requires_grad_(want)
        for tensor, want in zip(tensors, wanted, strict=False)
    ]


def _attend(inputs: Sequence[Any], options: Options) -> Tensor:
    return F.scaled_dot_product_attention(*inputs, **options)


def _nothing(_: Any) -> Any:
    """Save nothing for a graph that no backward pass runs through."""


class _Surroundings:
    """Autocast and the random state of dropout on a tensor's device at the operator's first run."""

    def __init__(self, tensor: Tensor, dropout: float) -> None:
        self._device = tensor.device
        self._autocast = self._current_autocast()
        self._states: tuple[Tensor, Tensor | None] | None = None
        if dropout:
            self._states = (torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if tensor.is_cuda else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore both for the with-block."""
        with ExitStack() as stack:
            stack.enter_context(self._autocast)
            if self._states is not None:
                host, device = self._states
                # fork_rng keeps the state of the CPU in any case
                stack.enter_context(torch.random.fork_rng([self._device] if device is not None else []))
                torch.set_rng_state(host)
                if device is not None:
                    torch.cuda.set_rng_state(device, self._device)
            yield

    def _current_autocast(self) -> AbstractContextManager[Any]:
        kind = self._device.type
        if not torch.amp.is_autocast_available(kind):
            return nullcontext()
        return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
