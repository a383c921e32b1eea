"""Stands in for ``actbench.tools.fit.bench`` in the tests of fit: a step of 10 GiB and a second, made up.

Every model of Hugging Face has blocks, as many as its specification says or else two; a model of one's own has none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from actbench.errors import ConversionError, NothingToConvertError
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.model.blocks import BlockReading, BlockReadings
from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Measurement, PeakParts, PhasePeaks
from actbench.model.records import Case
from actbench.tools.fit.costs import COPIED
from actbench.tools.fit.describe import parts_of

GIB = 1024**3
WEIGHTS = GIB
TOP = GIB // 2
HELD = 8 * GIB
"""Of all blocks together."""

DEEP = 16
"""Blocks of the model of which copies are made; they hold as much as those of a model with two."""

SECONDS, UPDATE_SECONDS = 1.0, 0.05
FACTORS = {"checkpoint": (0.25, 1.3), "gact": (0.125, 1.4), "msln": (0.75, 1.01), "lora": (0.25, 1.0)}
"""Of the bytes that blocks hold and of their time, by scheme."""

OF_TOP = {"chunked_loss": (0.5, 0.01)}
"""A factor of the bytes above the blocks, and seconds."""

OVER_ESTIMATE = 1.25
"""How many times the measured peak and step the simulated ones are."""


def blocks_of(model: str) -> list[str]:
    if ".py:" in model:
        return []
    found = re.search(r"num_hidden_layers=(\d+)", model)
    return [f"model.layers.{number}" for number in range(int(found[1]) if found else 2)]


class Session:
    def __init__(self, case: Case) -> None:
        self.case = case

    def memory(self) -> Measurement:
        time.sleep(float(os.environ.get("FAKEFIT_SLEEP", "0")))
        if log := os.environ.get("FAKEFIT_LOG"):
            with Path(log).open("a") as file:
                file.write(f"{self.case.meter} {self.case.scheme} {self.case.optimizer} {self.case.model}\n")
        if (refused := os.environ.get("FAKEFIT_REFUSED")) and refused in self.case.scheme:
            raise ConversionError(f"{refused}: this model has nothing to move")
        if (crashes := os.environ.get("FAKEFIT_CRASHED")) and crashes in self.case.scheme:
            raise RuntimeError(f"{crashes} met an operator\nof which pages follow")
        if any(idle in self.case.scheme for idle in os.environ.get("FAKEFIT_IDLE", "").split(",") if idle):
            raise NothingToConvertError(f"{self.case.scheme}: it holds no layer for this")
        held, seconds, top = self._costs(blocks_of(self.case.model) or [""])
        peak = WEIGHTS + round(sum(held)) + top
        if self.case.meter != "simulated":
            return Measurement(weights_bytes=WEIGHTS, activation_bytes=0, peak_bytes=round(peak / OVER_ESTIMATE))
        limit, step = self.case.memory_limit_bytes, sum(seconds) + UPDATE_SECONDS
        own = "SGD" if self.case.model.endswith(":descent") else "AdamW"
        return Measurement(
            weights_bytes=WEIGHTS,
            gradients_bytes=1,
            optimizer_bytes=2,
            dtype=self.case.dtype or ("bfloat16" if self.case.model.endswith(":half") else "float32"),
            optimizer=own,
            activation_bytes=peak - WEIGHTS,
            peak_bytes=peak,
            peak_parts=PeakParts(weights_bytes=WEIGHTS, activation_bytes=peak - WEIGHTS),
            phase_peaks=PhasePeaks(forward_bytes=peak, backward_bytes=peak, optimizer_bytes=WEIGHTS),
            memory_limit_bytes=limit,
            over_limit_bytes=peak - limit if limit and peak > limit else None,
            estimated=EstimatedTime(
                step_seconds=step,
                forward_seconds=sum(seconds) / 3,
                backward_seconds=2 * sum(seconds) / 3,
                optimizer_seconds=UPDATE_SECONDS,
                host_seconds=0,
                device_seconds=step,
                flops=0,
                moved_bytes=0,
            ),
            blocks=_readings(blocks_of(self.case.model), held, seconds, peak),
        )

    def _costs(self, paths: Sequence[str]) -> tuple[list[float], list[float], int]:
        """Return the bytes that blocks hold, their seconds, and the bytes above them."""
        count = len(paths) if len(paths) < COPIED else DEEP  # blocks of a copy are those of the deep model
        held = dict.fromkeys(paths, HELD / count)
        seconds = dict.fromkeys(paths, (SECONDS - UPDATE_SECONDS) / count)
        top, more = float(TOP), 0.0
        for part in parts_of(self.case.scheme, paths):
            for name in part.names:
                kind = name.partition(":")[0].partition(",")[0]
                of_bytes, of_seconds = FACTORS.get(kind, (1.0, 1.0))
                for path in part.blocks or paths:
                    held[path], seconds[path] = held[path] * of_bytes, seconds[path] * of_seconds
                of_top, longer = OF_TOP.get(kind, (1.0, 0.0))
                top, more = top * of_top, more + longer
        if self.case.optimizer == "adamw-fused":
            more -= UPDATE_SECONDS / 2
        return list(held.values()), [*seconds.values(), more], round(top)

    def time(self, steps: int) -> tuple[float, ...] | None:
        return (SECONDS / OVER_ESTIMATE,) * steps


def _readings(paths: Sequence[str], held: Sequence[float], seconds: Sequence[float], peak: int) -> BlockReadings | None:
    alive, read = WEIGHTS, []
    for path, more, taken in zip(paths, held, seconds, strict=False):
        after = alive + round(more)
        read.append(
            BlockReading(
                path=path,
                kind="equal",
                before_bytes=alive,
                after_bytes=after,
                forward_peak_bytes=after,
                backward_peak_bytes=after,
                done_bytes=alive,
                forward_seconds=taken / 3,
                backward_seconds=2 * taken / 3,
                output_bytes=0,
            )
        )
        alive = after
    if not read:
        return None
    ends = {"start_bytes": WEIGHTS, "stem_peak_bytes": WEIGHTS, "end_peak_bytes": WEIGHTS}
    return BlockReadings(blocks=tuple(read), top_peak_bytes=peak, **ends)
