"""The batches that the DataLoaders of a script make while it trains, and whether their size can be another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from actbench.errors import MeasurementError
from actbench.model.records import Built
from actbench.tools.script.steps import Step


class Loading(TypedDict):
    """The size of batches, and what is told of each."""

    batch_size: int | None
    fetched: Callable[[int], object]


_ASKED = "--batch-size and --max-batch change the batches of a DataLoader, and "
_REMEDY = "set the batch in the script, or by the script's own argument, behind its name"


class Batches:
    """Notes the rows of each batch that is loaded while gradients are recorded.

    Args:
        asked: The rows that the user asks for; None for those of the script.
        are_needed: Whether a script whose loaders make no batches is refused.

    Attributes:
        rows: Rows of the last batch; None before the first.
    """

    def __init__(self, asked: int | None, *, are_needed: bool = False) -> None:
        self.asked = asked
        self.rows: int | None = None
        self._are_needed = are_needed or asked is not None
        self._sizes: set[int] = set()

    @property
    def loading(self) -> Loading:
        """What :func:`actbench.tools.script.data.loaded_here` takes of it."""
        return {"batch_size": self.asked, "fetched": self.fetched}

    def built(self, model_class: str, step: Step) -> Built:
        """Return what is known of a model that was fed these batches in a step."""
        return Built(model_class=model_class, batch_size=self.rows, micro_batches=max(1, len(step.forwards)))

    def fetched(self, rows: int) -> None:
        """Note a batch."""
        self.rows = rows
        self._sizes.add(rows)

    def refuse_none(self) -> None:
        """Raise a MeasurementError if batches are needed and there was none; the end of the first step calls this."""
        if self._are_needed and not self._sizes:
            raise MeasurementError(f"{_ASKED}this script has no DataLoader that trains: {_REMEDY}")

    def refuse_others(self) -> None:
        """Raise a MeasurementError if no batch has the number of rows that was asked for."""
        self.refuse_none()
        if self.asked is not None and self.asked not in self._sizes:
            raise MeasurementError(
                f"{_ASKED}none of this script made {self.asked} rows: its loaders made "
                f"{', '.join(map(str, sorted(self._sizes)))}; {_REMEDY}"
            )
