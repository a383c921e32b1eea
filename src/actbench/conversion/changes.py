"""What a conversion changed in the modules of a model, and taking it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from actbench.errors import ConversionError

_ABSENT = object()


@dataclass(frozen=True, eq=False)
class _Change:
    """An entry of a module's attributes, or of a dict among them such as its children, before and after."""

    owner: str
    table: dict[str, Any]
    key: str
    before: Any
    after: Any

    def is_in_place(self) -> bool:
        return self.table.get(self.key, _ABSENT) is self.after

    def is_covered(self) -> bool:
        """Return whether another forward was bound, as far as one can see, in front of the one this put there."""
        return self.key == "forward" and self.key in self.table and not self.is_in_place()

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class Changes:
    """The entries that a with-block of :func:`noting` changed in the modules of a model."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def undo(self) -> None:
        """Put back what was there before, for good; restored layers get the train/eval flag of their stand-ins.

        What others changed since stays, unless it stands in front of a forward of the conversion.

        Raises:
            ConversionError: Another forward was bound in front of one since; all else is undone then.
        """
        covered = [change for change in self._changes if change.is_covered()]
        for change in self._changes:
            if change.is_in_place():
                _hand_over_flag(change)
                change.put(change.before)
        self._changes = covered
        if covered:
            raise ConversionError(
                f"the scheme cannot be taken off {covered[0].owner}: another forward was bound in front of its own "
                "since; take that one off first, and close the callback again"
            )

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what was there before, for the length of the with-block."""
        tables = {id(change.table): change.table for change in self._changes}.values()
        found = [(table, dict(table)) for table in tables]
        for change in self._changes:
            _hand_over_flag(change)
            change.put(change.before)
        try:
            yield
        finally:
            for table, now in found:  # as a whole, so that hooks keep their order
                table.clear()
                table.update(now)

    def _compare(self, before: dict[int, tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
        for owner, table, then in before.values():
            self._changes += [
                _Change(owner, table, key, then.get(key, _ABSENT), table.get(key, _ABSENT))
                for key in {**then, **table}
                if then.get(key, _ABSENT) is not table.get(key, _ABSENT)
            ]


@contextmanager
def noting(model: nn.Module) -> Iterator[Changes]:
    """Note what a with-block changes in the modules of a model, and take it back if the block raises."""
    before = {}
    for module in model.modules():
        for table in (vars(module), *(value for value in vars(module).values() if isinstance(value, dict))):
            before[id(table)] = (type(module).__name__, table, dict(table))
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    changes = Changes()
    try:
        yield changes
    except BaseException:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for _, table, then in before.values():
            table.clear()
            table.update(then)
        raise
    changes._compare(before)


def _hand_over_flag(change: _Change) -> None:
    if isinstance(change.before, nn.Module) and isinstance(change.after, nn.Module):
        change.before.train(change.after.training)
