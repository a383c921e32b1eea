"""Hooks where tensors cross between modules that all processes have and modules of which each has a part.

Hooks leave modules as they are, so that schemes which replace layers by their exact type find them, and take the hooks
along.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from actbench.errors import UsageError
from actbench.methods.parallel.tensor import ranks as across
from actbench.methods.parallel.tensor.ranks import OwnNumbers, Ranks

_SEQUENCE = 1
"""The dimension of tokens in what blocks are called with: (samples, tokens, width)."""


class _Hook:
    """A hook of a model that is shared among processes.

    Args:
        ranks: The processes.
        numbers: Drawn from by what is inside, from an entry to the exit behind it; None where it draws none.
        of_sequence: Whether outside of the modules each process has a part of the tokens.
    """

    uncompilable: ClassVar[tuple[str, str]] = (
        "a model whose layers are shared among processes",
        "its hooks change generators and parameters",
    )

    def __init__(self, ranks: Ranks, numbers: OwnNumbers | None = None, *, of_sequence: bool = False) -> None:
        self.ranks, self.numbers, self.of_sequence = ranks, numbers, of_sequence

    def _begin(self, module: nn.Module, x: Tensor) -> None:
        if self.numbers is not None and module.training:
            self.numbers.begin(x)

    def _end(self) -> None:
        if self.numbers is not None:
            self.numbers.end()


class Entry(_Hook):
    """A forward pre-hook: each process uses the inputs of a module in its own part."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with their gradients summed over the processes."""
        first = first_tensor(args, kwargs)
        self._begin(module, first)

        def crossed(value: Any) -> Any:
            if value is first and self.of_sequence:
                return across.shared_parts(value, self.ranks, _SEQUENCE)
            if isinstance(value, Tensor) and value.requires_grad:
                return across.shared(value, self.ranks)
            return value

        return tuple(map(crossed, args)), {name: crossed(value) for name, value in kwargs.items()}


class Exit(_Hook):
    """A forward hook: what processes compute in parts is summed."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        """Return the sum, or this process's part of it."""
        self._end()
        if output is None:  # the layer has raised something
            return None
        if self.of_sequence:
            return across.part_of_sum(output, self.ranks, _SEQUENCE)
        return across.summed(output, self.ranks)


class SequenceEntry(_Hook):
    """A forward pre-hook of the first block: each process takes its part of the tokens."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with the part of the tokens.

        Raises:
            UsageError: The tokens do not divide among the processes.
        """
        first = first_tensor(args, kwargs)
        if first.dim() != 3 or first.shape[_SEQUENCE] % self.ranks.size:
            raise UsageError(
                f"tp with sequence=true: the blocks are given a tensor of shape {tuple(first.shape)}, (samples, tokens,"
                f" width), whose tokens do not divide among {self.ranks.size} processes; take another --sequence-length"
            )
        self._begin(module, first)

        def crossed(value: Any) -> Any:
            return across.part(value, self.ranks, _SEQUENCE) if value is first else value

        return tuple(map(crossed, args)), {name: crossed(value) for name, value in kwargs.items()}


class SequenceExit(_Hook):
    """A forward hook of the last block: all processes have all tokens again."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return all tokens."""
        self._end()
        if output is None:  # the block has raised something
            return None
        first, *others = output if isinstance(output, tuple) else (output,)
        whole = across.joined(first, self.ranks, _SEQUENCE)
        return (whole, *others) if isinstance(output, tuple) else whole


class SummedGradients(_Hook):
    """Hooks of a module whose parameters all processes have, and use with a part of the data each.

    The gradient of such a parameter is the sum over the processes. While the module runs, a tensor in place of the
    parameter has a gradient that is summed; a hook on the parameter would be lost where FSDP replaces the parameter.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._before: dict[str, nn.Parameter] = {}

    def bind(self, module: nn.Module) -> None:
        """Put the hooks on a module."""
        module.register_forward_pre_hook(self.begin)
        # after an error too, as the one by which checkpointing ends a second run
        module.register_forward_hook(self, always_call=True)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Let tensors with the same values stand in place of the parameters."""
        self(module, args, None)
        parameters: Any = module._parameters
        self._before = {name: each for name, each in parameters.items() if each is not None and each.requires_grad}
        parameters.update({name: across.shared(each, self.ranks) for name, each in self._before.items()})

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back."""
        module._parameters.update(self._before)
        self._before = {}


def first_tensor(args: Iterable[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return what a module works on: its first argument that is a tensor of floating-point numbers."""
    values = (*args, kwargs.get("hidden_states"), *kwargs.values())
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
