from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from actbench.model.provenance import Machine, Versions
from actbench.model.records import Failure
from actbench.packing.forwardwrapper import ReboundForward
from actbench.tools.convert.model import conversion_of
from actbench.tools.train.records import Evaluation, Trained, TrainingCase, TrainingRun

MakeRun = Callable[..., TrainingRun]


def _tables(model: nn.Module) -> list[dict[str, Any]]:
    """Return what the modules of a model hold: attributes, children, hooks."""
    found = []
    for module in model.modules():
        found.append({name: value for name, value in vars(module).items() if name != "training"})
        found += [dict(value) for value in vars(module).values() if isinstance(value, dict)]
    return found


@pytest.fixture
def tables() -> Callable[[nn.Module], list[dict[str, Any]]]:
    return _tables


@pytest.fixture
def is_plain() -> Callable[[nn.Module], bool]:
    """Return whether nothing of a scheme is on a model, in autograd or in torch's modes."""

    def check(model: nn.Module) -> bool:
        ours = any(type(module).__module__.startswith("actbench.") for module in model.modules())
        bound = any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
        hooks = any(module._forward_pre_hooks for module in model.modules())
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        return not (ours or bound or hooks or saving or modes) and conversion_of(model) is None

    return check


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
