"""Schemes: methods that change what a training step keeps for backward.

A scheme is a frozen value whose fields are its parameters. It lives in one file of this package, derives from
:class:`Scheme` and gives ``name``, ``summary`` and ``change``; nothing else has to be told of it.
"""

from __future__ import annotations

from actbench.schemes.base import Scheme
from actbench.schemes.registry import alone, build, changing, find, lookup, names
from actbench.setup import TrainingSetup

__all__ = ["Scheme", "alone", "apply", "build", "changing", "find", "lookup", "names"]


def apply(setup: TrainingSetup, scheme: str | Scheme) -> TrainingSetup:
    """Return a training setup with a scheme applied to all of it: model, loss, optimizer, how the batch is fed.

    For example::

        setup = actbench.TrainingSetup(model, loss=loss, make_optimizer=lambda model: AdamW(model.parameters()))
        setup = actbench.apply(setup, "lora:16+adam8bit+accumulate:4")
        step = actbench.TrainStep(setup, first_batch)
        for step.batch in batches:
            print(step())

    The model is changed in place.

    Args:
        setup: With a loss and what makes the optimizer, where a step is to be run.
        scheme: A specification, or a scheme.

    Raises:
        SpecError: The specification is wrong.
        ConversionError: The scheme finds nothing to work on, or cannot work on the setup.
        MeasurementError: A package that the scheme needs is not installed.
    """
    return (build(scheme) if isinstance(scheme, str) else scheme).apply(setup)
