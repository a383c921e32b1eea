"""The batches that the DataLoaders of a script make while it trains, and whether their size can be another one.

A loader may be ahead of the loop, as accelerate's is by one batch. So a step has the rows that its model was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from actbench.errors import MeasurementError
from actbench.model.records import Built
from actbench.tools.script.steps.counting import Step


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

    """

    def __init__(self, asked: int | None, *, are_needed: bool = False) -> None:
        self.asked = asked
        self._last: int | None = None
        self._fed: int | None = None
        self._are_needed = are_needed or asked is not None
        self._sizes: set[int] = set()

    @property
    def loading(self) -> Loading:
        """What :func:`actbench.tools.script.libraries.data.loaded_here` takes of it."""
        return {"batch_size": self.asked, "fetched": self.fetched}

    def built(self, model_class: str, step: Step, peaks: Sequence[int]) -> Built:
        """Return what is known of a model that was fed these batches in a step, and of the ``peaks`` of all steps."""
        micro_batches = max(1, len(step.forwards))
        return Built(
            model_class=model_class, batch_size=step.rows, micro_batches=micro_batches, step_peaks=tuple(peaks)
        )

    def fetched(self, rows: int) -> None:
        """Note a batch that a loader has made."""
        self._last = rows
        self._sizes.add(rows)

    def fed(self, arguments: Any) -> None:
        """Note what a model was given; its rows are known if a batch had so many."""
        rows = next((each for each in _leading(arguments) if each in self._sizes), None)
        self._fed = max(rows or 0, self._fed or 0) or None

    def of_step(self) -> int | None:
        """Return the rows of the largest batch since the last call: of those fed, else of the last that was made."""
        rows, self._fed = self._fed or self._last, None
        return rows

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


def _leading(values: Any) -> Iterator[int]:
    """Yield the numbers of rows of tensors among nested values, and those of lists of tensors."""
    if isinstance(values, Tensor):
        yield from values.shape[:1]
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _leading(value)
    elif isinstance(values, list | tuple):
        if values and all(isinstance(value, Tensor) for value in values):
            yield len(values)
        for value in values:
            yield from _leading(value)
