"""Whether each part of a scheme acts in the steps of a training run, found out before the first."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_map

from actbench.errors import ModelError, UntraceableError
from actbench.foreign import boundary
from actbench.inspection import refuse_idle, trace
from actbench.meters import Meter
from actbench.training import Batch, TrainingSetup


def check_acts(setup: TrainingSetup, meter: Meter, batch: Batch) -> tuple[str, ...]:
    """Run one forward pass of a run on fake tensors, and refuse a scheme of which a part does nothing in it.

    Args:
        setup: The model with the scheme applied.
        meter: Of the device that the run is on.
        batch: The first of the run.

    Returns:
        A warning where nobody can tell, since the model does not run on fake tensors.

    Raises:
        ConversionError: Nothing that a part converted runs.
        IdleError: It runs, and changes nothing of what the step keeps.
    """
    try:
        with meter.operators(), boundary("it cannot be run on fake tensors", UntraceableError):
            seen = trace(setup, lambda: {name: tree_map(_fake, value) for name, value in batch.items()})
    except (UntraceableError, ModelError) as error:  # what is wrong with the model is for a real step to say
        return (f"whether each part of the scheme acts is unknown: {error}",)
    for part in setup.parts:
        refuse_idle(part, seen)
    return ()


def _fake(value: Any) -> Any:
    mode = active_fake_mode()
    return mode.from_tensor(value) if isinstance(value, Tensor) and mode is not None else value
