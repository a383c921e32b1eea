"""Peaks of the last passing run of each test, in a file that is meant to be committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from actbench.errors import StoreError
from actbench.model.data import Data
from actbench.model.timeline import TITLES, Kind
from actbench.paths import read_bytes, write_whole
from actbench.report.linefile import locked
from actbench.units import MIB, NonNegativeInt, PositiveInt, format_bytes
from actbench.validation import explain

_MOST_BYTES = 256 * MIB
_WAIT_SECONDS = 60.0


class Reading(Data):
    """What a test needed on its card.

    Attributes:
        device: Name of the card.
        peak_bytes: Most bytes allocated in a step; ``held_bytes`` are those of each kind.
        needed_bytes: The peak, with the gaps of torch's allocator.
        limit_bytes: What a step may take.
        mark: ``at most`` or ``~`` where the peak is a bound or an estimate.
    """

    device: str
    peak_bytes: NonNegativeInt
    needed_bytes: NonNegativeInt
    limit_bytes: PositiveInt
    mark: Literal["", "~", "at most "] = ""
    held_bytes: dict[Kind, NonNegativeInt] = Field(default_factory=dict)

    @property
    def peak(self) -> str:
        """The peak for messages."""
        return f"{self.mark}{format_bytes(self.peak_bytes)}"

    def change(self, before: Reading) -> float | None:
        """Return the share by which the peak is higher than before; None where another card was simulated."""
        if before.device != self.device:
            return None
        return self.peak_bytes / before.peak_bytes - 1 if before.peak_bytes else None

    def compared_with(self, before: Reading) -> str:
        """Return how the peak differs from the last passing run, as a sentence."""
        change = self.change(before)
        if change is None:
            return f"The last passing run was on {before.device}, with {before.peak}: it is not compared."
        if self.peak_bytes == before.peak_bytes:
            return "The last passing run had the same peak."
        kinds = [(kind, self.held_bytes.get(kind, 0) - before.held_bytes.get(kind, 0)) for kind in TITLES]
        changed = sorted((each for each in kinds if each[1]), key=lambda each: -abs(each[1]))
        parts = ", ".join(f"{TITLES[kind]} {_signed(amount)}" for kind, amount in changed)
        more = _signed(self.peak_bytes - before.peak_bytes)
        return f"The last passing run had {before.peak}; now {more} ({100 * change:+.1f} %): {parts}."


class Baseline(Data):
    """The file: a reading for each test, by its node id."""

    version: Literal[1] = 1
    tests: dict[str, Reading] = Field(default_factory=dict)


def read(path: Path) -> Mapping[str, Reading]:
    """Return the readings of a file; none if there is no such file.

    Raises:
        StoreError: It cannot be read, or is no such file.
    """
    try:
        content = read_bytes(path, _MOST_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"--gpu-memory-baseline {path}: it cannot be read: {error.strerror}") from None
    try:
        return Baseline.model_validate_json(content).tests
    except ValidationError as error:
        why = "; ".join(explain(error, {}, {"": Baseline}))
        raise StoreError(
            f"--gpu-memory-baseline {path}: this is not a file of peaks ({why}): name another, or remove it"
        ) from None


def merge(path: Path, found: Mapping[str, Reading]) -> None:
    """Put readings into a file, whose other tests stay as they are.

    Raises:
        StoreError: It cannot be read or written.
    """
    with locked(path, wait_seconds=_WAIT_SECONDS):
        tests = {**read(path), **found}
        ordered = Baseline(tests={name: tests[name] for name in sorted(tests)}).model_dump(mode="json")
        try:
            write_whole(path, f"{json.dumps(ordered, indent=1)}\n".encode())
        except OSError as error:
            raise StoreError(f"--gpu-memory-baseline {path}: it cannot be written: {error.strerror}") from None


def _signed(amount: int) -> str:
    return f"{'+' if amount > 0 else '-'}{format_bytes(abs(amount))}"
