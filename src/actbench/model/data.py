"""The base of all values that are read from or written to a file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo


class Data(BaseModel):
    """A frozen value that is read from or written to a file; unknown fields are refused.

    NaN and infinity are written as strings and read back as numbers, since null means that nothing was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class _NoFieldsSet:
    """Takes the place of pydantic's set of given fields, and keeps nothing."""

    def __get__(self, instance: object, owner: type) -> set[str]:
        return set()

    def __set__(self, instance: object, given: set[str]) -> None:
        pass


class StoredData(Data):
    """Data that results files hold by the thousand.

    A line has every field, so which ones were given says nothing; pydantic's set of them takes more memory than the
    values. ``model_fields_set`` is empty.
    """

    __pydantic_fields_set__ = _NoFieldsSet()


def shared(part: Any, info: ValidationInfo) -> Any:
    """Return the first part that equals this one, of those read with one dictionary as pydantic's context."""
    if info.context is None:
        return part
    key = (type(part), *vars(part).values()) if isinstance(part, Data) else part  # compared at once, not by pydantic
    return info.context.setdefault(key, part)


class CaseData(StoredData):
    """What an experiment runs, with the words that its progress is told in; a subclass has a ``name`` for messages."""

    @property
    def title(self) -> str:
        """The name, with all that distinguishes it from other cases of its experiment."""
        return str(getattr(self, "name", type(self).__name__))

    @property
    def cells(self) -> dict[str, str]:
        """What distinguishes it from others of its experiment, by heading of the table of progress."""
        return {"case": self.title}

    @property
    def pace(self) -> str:
        """A value that is equal for cases that take about as long as each other."""
        return type(self).__name__

    @property
    def first_state(self) -> str:
        """What is done first with the case."""
        return "at work"

    @property
    def is_searched(self) -> bool:
        """Whether a search follows when the case is measured."""
        return False


LEFT_OUT = "left out"
"""The state of a case that a search leaves out, since its model or device refuses it."""


class OutcomeData(StoredData):
    """The outcome of a case, in the words of progress; the table's column shows its ``peak_bytes``, if it has any."""

    @property
    def state(self) -> str:
        """How the case ended, in a word or two."""
        return "measured"

    @property
    def ending(self) -> str:
        """How the case ended, with its main figures."""
        return self.state

    @property
    def is_told(self) -> bool:
        """Whether progress shows a line for this outcome even if it shows none for each case."""
        return True
