"""What a conversion changed in a model, and how to undo it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from actbench.errors import ConversionError


class _Absent:
    """Stands for a missing entry; it is a class, so that copies and pickles of it are the same object."""


@dataclass(eq=False)
class _Change:
    """An attribute of a module, or an entry of a dict among its attributes (``table``), before and after.

    The reference to the module is weak, because the module refers to this change: an unused model is freed at once.
    """

    module: Callable[[], nn.Module | None]
    table: str
    key: str
    before: Any
    after: Any

    @property
    def entries(self) -> dict[str, Any]:
        module = self.module()
        attributes = {} if module is None else vars(module)
        return attributes.get(self.table, {}) if self.table else attributes

    def is_in_place(self) -> bool:
        return self.entries.get(self.key, _Absent) is self.after

    def is_covered(self, inside: set[nn.Module]) -> bool:
        """Return whether somebody has since wrapped the new value: a module still in the model, or a forward."""
        if self.is_in_place():
            return False
        forward = self.key == "forward" and self.key in self.entries
        return forward or (isinstance(self.after, nn.Module) and self.after in inside)

    def put_back(self) -> None:
        if isinstance(self.before, nn.Module) and isinstance(self.after, nn.Module):
            self.before.train(self.after.training)
        if self.before is _Absent:
            self.entries.pop(self.key, None)
        else:
            self.entries[self.key] = self.before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": self.module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, module=_weakly(state["module"]))


class Changes:
    """What a with-block of :func:`noting` changed in the modules of a model; a copy of the model has its own.

    Attributes:
        lost: Names of the parameters that the model has lost: the conversion cannot be undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.lost: tuple[str, ...] = ()
        self._model = _weakly(model)
        self._replaced: nn.Module | None = None
        self._changes: list[_Change] = []
        self._frozen: list[tuple[nn.Parameter, bool]] = []

    def undo(self) -> nn.Module:
        """Undo the changes for good; restored layers get the train/eval flag of the layers that replaced them.

        What others have changed since stays, unless it wraps something of the conversion.

        Returns:
            The unconverted model.

        Raises:
            ConversionError: Another forward or module has since wrapped one of the conversion; everything else is then
                undone. Or the model is gone.
        """
        model = self.converted
        inside = set(model.modules())
        covered = [change for change in self._changes if change.is_covered(inside)]
        for change in self._changes:
            if change.is_in_place():
                change.put_back()
        for parameter, trained in self._frozen:
            parameter.requires_grad_(trained)
        self._changes, self._frozen = covered, []
        if covered:
            what = "module" if isinstance(covered[0].after, nn.Module) else "forward"
            raise ConversionError(
                f"the scheme cannot be removed from {type(covered[0].module()).__name__}: another {what} has since "
                "wrapped the scheme's; remove that one first, then undo (a callback or controller: close) again"
            )
        if self._replaced is None:
            return model
        return self._replaced.train(model.training)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the changes for the length of the with-block."""
        tables = {id(change.entries): change.entries for change in self._changes}.values()
        found = [(table, dict(table)) for table in tables]
        for change in self._changes:
            change.put_back()
        try:
            yield
        finally:
            for table, now in found:  # the whole dict at once, so that hooks keep their order
                table.clear()
                table.update(now)

    @property
    def converted(self) -> nn.Module:
        """The converted model; a ConversionError if it is gone."""
        model = self._model()
        if model is None:
            raise ConversionError("the converted model is gone, so nothing can be undone; keep the model")
        return model

    def became(self, model: nn.Module) -> None:
        """Note the converted model, which may be another object."""
        if model is not self.converted:
            self._replaced, self._model = self.converted, _weakly(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _model=_weakly(state["_model"]))


@contextmanager
def noting(model: nn.Module) -> Iterator[Changes]:
    """Note what a with-block changes in the modules of a model, and undo it if the block raises."""
    before = _Snapshot(model)
    changes = Changes(model)
    try:
        yield changes
    except BaseException:
        before.restore()
        raise
    before.compare(changes)


class _Snapshot:
    """The attributes of a model's modules, the dicts among the attributes, and which parameters are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (module, name, table, dict(table))
            for module in model.modules()
            for name, table in [("", vars(module)), *((n, v) for n, v in vars(module).items() if isinstance(v, dict))]
        ]
        self._parameters = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def restore(self) -> None:
        for _, parameter, trained in self._parameters:
            parameter.requires_grad_(trained)
        for _, _, table, then in self._tables:
            table.clear()
            table.update(then)

    def compare(self, changes: Changes) -> None:
        held = set(changes.converted.parameters())
        changes.lost = tuple(name for name, parameter, _ in self._parameters if parameter not in held)
        if changes.lost:
            return  # nothing refers to the modules any more
        changes._frozen = [(found, trained) for _, found, trained in self._parameters if found.requires_grad != trained]
        changes._changes = [
            _Change(_weakly(module), name, key, then.get(key, _Absent), table.get(key, _Absent))
            for module, name, table, then in self._tables
            for key in {**then, **table}
            if then.get(key, _Absent) is not table.get(key, _Absent)
        ]


def _weakly(module: nn.Module | None) -> Callable[[], nn.Module | None]:
    return weakref.ref(module) if module is not None else lambda: None
