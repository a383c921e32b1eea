"""Blocks that save the results of products and attention, and recompute the rest in the backward pass.

torch's own ``create_selective_checkpoint_contexts`` allows only one backward pass, raises if a result is changed in
place, and lets dropout after an attention that does not run again draw other masks. So it is used only in compiled
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from actbench.errors import ConversionError
from actbench.methods.checkpointing.recomputed import Around, RecomputedForward
from actbench.packing import savedtensors
from actbench.packing.packer import StaysHere

Policy = Literal["compute_intensive", "half"]
"""Which results are saved: all expensive ones, or those of attention and of every second product."""

Operators = Literal["linear", "bmm", "softmax", "convolution", "attention"]
"""Operators by what they compute: a linear layer, products of two batches of matrices, softmax, a convolution, and a
fused attention.
"""

_NAMES: dict[Operators, Callable[[str], bool]] = {
    "linear": frozenset(("mm", "addmm")).__contains__,
    "bmm": frozenset(("bmm", "baddbmm")).__contains__,
    "softmax": frozenset(("_softmax", "_safe_softmax")).__contains__,
    "convolution": lambda name: "convolution" in name,
    "attention": lambda name: "attention" in name,
}
"""Whether an operator of torch with this name is one of them."""


class _Choice:
    """Decides for the operators of one run, one after the other, whether their results are saved."""

    def __init__(self, policy: Policy, keep: tuple[Operators, ...]) -> None:
        self._policy, self._keep, self._products = policy, keep, 0

    def __call__(self, operator: Any) -> bool:
        """Return whether the result of the operator that runs now is saved.

        An operator is expensive if torch counts its floating point operations: products, convolutions, fused attention.
        ``torch.utils.flop_counter.register_flop_formula`` makes a custom operator expensive. ``keep`` names others.
        """
        packet = getattr(operator, "_overloadpacket", operator)
        if self._keep:
            return any(_NAMES[each](packet.__name__) for each in self._keep)
        if packet not in flop_registry:
            return False
        if self._policy == "compute_intensive" or "attention" in str(operator):
            return True
        self._products += 1
        return self._products % 2 == 1


@dataclass(frozen=True)
class _ByHooks:
    """A tensor that the hooks around a block have packed."""

    packed: Any
    by: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        return self.by(self.packed)


@dataclass(frozen=True)
class _Result:
    """An operator's result with its saved tensors, and a function that sets the generator as the operator left it."""

    operator: Any
    leaves: list[Any]
    structure: TreeSpec
    draw_on: Callable[[], None]

    @classmethod
    def of(cls, operator: Any, value: Any) -> _Result:
        """Return the result of an operator that just ran."""
        leaves, structure = tree_flatten(value)
        # Beneath autograd a view has a separate version unless this key is active.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            kept = [StaysHere(leaf.detach(), leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(operator, kept, structure, _generator_as_it_is(operator, leaves))

    def names(self) -> list[int]:
        """Return a name for the memory of each tensor."""
        return [_name_of(leaf.tensor) for leaf in self.leaves if isinstance(leaf, StaysHere)]

    def packed(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> _Result:
        """Return the result with its tensors packed by hooks."""
        leaves = [_ByHooks(pack(leaf.tensor), unpack) if isinstance(leaf, StaysHere) else leaf for leaf in self.leaves]
        return _Result(self.operator, leaves, self.structure, self.draw_on)

    def unpacked(self) -> Any:
        """Return the operator's result, without a graph."""
        leaves = [leaf.unpack().detach() if isinstance(leaf, StaysHere | _ByHooks) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def _generator_as_it_is(operator: Any, leaves: list[Any]) -> Callable[[], None]:
    """Return a function that sets the generator to its present state, for an operator that may have drawn from it."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return lambda: None
    if leaves[0].is_cuda:
        return partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(leaves[0].device), leaves[0].device)
    return partial(torch.set_rng_state, torch.get_rng_state())


class KeptResults(Around):
    """The results that the first run of a block saves for further runs; None for a result that is recomputed."""

    def __init__(self, choose: Callable[[], _Choice]) -> None:
        self._choose = choose
        self._results: list[_Result | None] = []

    def first(self) -> AbstractContextManager[Any]:
        """Save the results of operators inside the context, except results that are later changed in place there."""
        return _Keeping(self._choose(), self._results)

    def ran(self, found: Any) -> None:
        """Release what the block returns, which its caller may change; pack the rest like saved tensors."""
        returned = {_name_of(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}
        # those of checkpointing ended with the first run, so that these are of what is around it
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        for index, result in enumerate(self._results):
            if result is not None and returned.intersection(result.names()):
                self._results[index] = None
            elif result is not None and hooks is not None:
                self._results[index] = result.packed(*hooks)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make the same operators return the saved results; release these, unless the graph is retained.

        Hooks unpack before any operator runs: they may run operators under autograd.
        """
        given = [None if result is None else (result, result.unpacked()) for result in self._results]
        # nothing public tells whether backward() was called with retain_graph=True
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._results.clear()
        with _Giving(self._choose(), given):
            yield


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, choice: _Choice, results: list[_Result | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._results = choice, results
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        for changed in _changed_by(func, args, kwargs):
            index = self._made.pop(_name_of(changed), None)
            if index is not None:
                self._results[index] = None
        if self._choice(func):
            result = _Result.of(func, value)
            self._made |= dict.fromkeys(result.names(), len(self._results))
            self._results.append(result)
            savedtensors.acted(KeptResults)
        return value


def _changed_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes. Versions do not show this: an unsafe view has its own version."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    yield from (leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))


def _name_of(tensor: Tensor) -> int:
    """Return a name for the memory of a tensor, valid while it is held."""
    name: int = tensor.untyped_storage()._cdata
    return name


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, choice: _Choice, given: list[tuple[_Result, Any] | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # turned round, so that the first result is the first to be popped
        self._choice, self._given = choice, given[::-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._given.pop() if self._choice(func) and self._given else None
        if found is None:
            return func(*args, **(kwargs or {}))
        result, value = found
        if result.operator is not func:
            raise RuntimeError(
                f"selective: where a block ran {result.operator} in the forward pass it ran {func} in the backward "
                "pass; what a block computes must not depend on state that changes in between"
            )
        result.draw_on()
        return value


def compiled_contexts(choose: Callable[[], _Choice]) -> tuple[Any, Any]:
    """Return the contexts that tell a compiler which results of a block to save; see ``torch.utils.checkpoint``."""
    choice = choose()

    def kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = not context.is_recompute and choice(operator)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(kept)  # type: ignore[no-any-return, no-untyped-call]


class SelectiveForward(RecomputedForward):
    """A recomputed forward that saves those results of its first run that ``keep`` names, or else a policy chooses."""

    def __init__(
        self,
        module: nn.Module,
        path: str = "",
        policy: Policy = "compute_intensive",
        keep: tuple[Operators, ...] = (),
    ) -> None:
        super().__init__(module, path)
        self._choose = partial(_Choice, policy, keep)
        self.compiled = {"context_fn": partial(compiled_contexts, self._choose)}

    def _around(self) -> Around:
        return KeptResults(self._choose)

    def _packed(self, *_: Any) -> NoReturn:
        raise ConversionError(
            "selective: hooks pack what the model saves, and would not see the results that its blocks keep; leave one "
            "of them out"
        )
