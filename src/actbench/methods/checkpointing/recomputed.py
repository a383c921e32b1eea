"""Blocks whose activations are recomputed in the backward pass (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174), by torch's non-re-entrant checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from actbench.methods.checkpointing.rerun import Rerun, Written, writes_buffers
from actbench.packing import savedtensors
from actbench.packing.copies import copied, is_cache, is_empty
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked.hooks import Hooks, active
from actbench.packing.packer import own_tensors
from actbench.packing.refusals import refuse_exporting
from actbench.packing.wrapped import WrappedForward, checkpoint_hook

_TENSOR = object()
"""Stands for a tensor among the arguments or results of a block."""


class Around:
    """Contexts around the runs of a block, besides its buffers: none."""

    def first(self) -> AbstractContextManager[Any]:
        """Return the context of the first run."""
        return nullcontext()

    def ran(self, found: Any) -> None:
        """End the first run, which returned ``found``."""

    def again(self) -> AbstractContextManager[Any]:
        """Return the context of a further run."""
        return nullcontext()


class RecomputedForward(ReboundForward):
    """A forward that saves only its inputs and runs again in the backward pass; plain outside of training.

    Attributes:
        compiled: Further settings of torch's checkpointing in a graph that is compiled.
    """

    recomputes = True

    def __init__(self, module: nn.Module, path: str = "") -> None:
        super().__init__(module)
        self.path = path
        self.written = Written()
        self.compiled: dict[str, Any] = {}

    def bind(self) -> None:
        """Make this part of the forward of the module, inside of what wraps the passes through it.

        Hooks on the module then pack what the block keeps, its inputs, and what its second run saves.
        """
        wrapping = [bound for bound in self.all_of(self.module) if isinstance(bound, WrappedForward)]
        if wrapping:
            self._before, wrapping[-1]._before = wrapping[-1]._before, self
        else:
            super().bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block under checkpointing."""
        module = self.module
        if not (module.training and torch.is_grad_enabled()):
            return self.inner(module, *args, **kwargs)
        refuse_exporting("a model whose blocks run again in the backward pass", "an exported graph has no such pass")
        if torch.compiler.is_compiling() and writes_buffers(module, self.written):
            return self._uncompiled(module, args, kwargs)
        return self._checkpointed(module, args, kwargs)

    @_disable_dynamo
    def _uncompiled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block uncompiled: a compiler would recompute it from the buffers that it has written."""
        return self._checkpointed(module, args, kwargs)

    def _checkpointed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(_for_two_runs(value) for value in args)
        kwargs = {name: _for_two_runs(value) for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        savedtensors.acted(RecomputedForward)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                savedtensors.left(value, "goes into a recomputed block")

        hooks = active()
        # The model's own checkpointing runs this again in the backward pass, where no hooks are active: both runs must
        # save the same, so that both leave what they save to it.
        if hooks is not None and checkpoint_hook() is None:
            return self._packed(hooks, module, args, kwargs)

        def run(*args: Any) -> Any:
            return self.inner(module, *map(copied, args), **{name: copied(value) for name, value in kwargs.items()})

        # Codes may have other bits in the second run, which their layers handle: so shapes are not compared.
        settings: dict[str, Any] = {"use_reentrant": False, "determinism_check": "none"}
        if torch.compiler.is_compiling():  # a compiled graph updates the statistics of norms only once anyway
            return checkpoint(run, *args, **settings, **self.compiled)
        around = self._around()
        rerun = Rerun(module, self.written, around.again)
        found = checkpoint(run, *args, context_fn=lambda: (around.first(), rerun), **settings)
        rerun.ran()
        around.ran(found)
        return found

    def _around(self) -> Around:
        """Return the contexts around the runs of one call of the block."""
        return Around()

    def _packed(self, hooks: Hooks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block twice under hooks that pack saved tensors: first its inputs, and in backward all the rest.

        Of nested hooks only the innermost run. So torch's non-re-entrant form, which finds out by hooks what to
        recompute, would either see nothing or leave the second run unpacked. The re-entrant form needs each tensor that
        may have a graph as a separate argument or result, and one argument that has a graph.
        """
        sites = hooks.sites  # the sites of this pass; a step may call several modules
        if hooks.probing:
            with hooks.block(self.path, sites):
                return self.inner(module, *args, **kwargs)
        tensors, given = _taken_apart((args, kwargs))
        if not any(tensor.requires_grad for tensor in (*tensors, *own_tensors(module))):
            return self.inner(module, *args, **kwargs)
        savedtensors.acted(hooks.packer)  # in the second run, even if the inputs are others' and stay whole
        rerun, results = Rerun(module, self.written), list[_Rest]()

        def run(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            args, kwargs = given.together(tensors)
            if torch.is_grad_enabled():
                with rerun as buffers, hooks.block(self.path, sites):
                    hooks.packer.exclude.add(buffers)
                    return tuple(_taken_apart(self.inner(module, *args, **kwargs))[0])
            found, rest = _taken_apart(self.inner(module, *args, **kwargs))
            rerun.ran()
            results.append(rest)
            return tuple(found)

        with_graph = torch.empty(0, requires_grad=True)  # the tensors may have no graph while the block's parameters do
        found: tuple[Tensor, ...] = checkpoint(run, with_graph, *tensors, use_reentrant=True)
        return results.pop().together(found)


class _Rest(NamedTuple):
    """A nesting of values without its tensors, which only autograd shall hold."""

    leaves: list[Any]
    structure: TreeSpec

    def together(self, tensors: Iterable[Tensor]) -> Any:
        """Return the nesting with these tensors, and with copies of its caches, which may be filled separately."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else copied(leaf) for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def _taken_apart(values: Any) -> tuple[list[Tensor], _Rest]:
    leaves, structure = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, _Rest([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def _for_two_runs(value: Any) -> Any:
    """Return an argument in a form that both runs of a block may use.

    An empty cache of keys and values is left out, as transformers itself does. A filled one is copied for each run: the
    second run would fill it again. A list is copied: the caller may append to it between the runs, as DenseNet does.
    """
    if is_cache(value) and is_empty(value):
        return None
    return list(value) if isinstance(value, list) else copied(value)
