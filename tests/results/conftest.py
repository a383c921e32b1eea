from __future__ import annotations

from collections.abc import Callable

import pytest

from actbench.model.provenance import Machine, Versions
from actbench.model.records import Failure
from actbench.tools.train.records import Evaluation, Trained, TrainingCase, TrainingRun

MakeRun = Callable[..., TrainingRun]


@pytest.fixture
def make_run() -> MakeRun:
    """Return a maker of runs: scheme, seed and what the finished model scores."""

    def make(
        scheme: str = "exact",
        seed: int = 0,
        accuracy: float = 0.9,
        *,
        losses: tuple[float, ...] = (2.0, 1.0),
        peak_bytes: int = 1000,
        failed: bool = False,
        diverged_at: int | None = None,
        machine: str = "box",
        gpu: str | None = None,
    ) -> TrainingRun:
        outcome: Trained | Failure = Trained(
            metric="accuracy",
            steps=2,
            losses=losses,
            step_seconds=(0.5, 0.5),
            evaluations=(Evaluation(step=2, loss=losses[-1], accuracy=accuracy),),
            diverged_at=diverged_at,
            weights_bytes=10,
            optimizer_bytes=20,
            activation_bytes=30,
            peak_bytes=peak_bytes,
        )
        if failed:
            outcome = Failure(reason="nothing-converted", message="nothing here")
        return TrainingRun(
            recipe="made",
            case=TrainingCase(
                model="tiny", data="digits", scheme=scheme, batch_size=4, steps=2, learning_rate=0.1, seed=seed
            ),
            outcome=outcome,
            machine=Machine(
                name=machine, system="Linux", processor="a processor", cores=2, memory_bytes=8 * 1024**3, gpu=gpu
            ),
            versions=Versions(actbench="0.1.0", python="3.11.9", torch="2.11.0"),
            command="actbench train made",
            recorded_at="2026-01-02T03:04:05+00:00",
        )

    return make
