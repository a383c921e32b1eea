"""Schemes: methods that change a training step, such as what it saves for backward.

A scheme is a frozen value whose fields are its parameters. It derives from :class:`Scheme`, defines ``name``, ``card``
and ``change``, and comes in by an entry point of the group ``actbench.schemes``. ``examples/plugin`` is a whole one.
"""

from __future__ import annotations

from actbench.errors import check_argument
from actbench.packing.refusals import check_module, refuse_lazy
from actbench.scheme.base import SAVED_RESULTS, SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.packedsaved import with_packed_saved_tensors
from actbench.scheme.registry import alone, build, changing, examples, find_schemes, lookup, scheme_names
from actbench.scheme.setup import TrainingSetup

__all__ = [
    "SAVED_RESULTS",
    "SAVED_TENSORS",
    "Card",
    "Scheme",
    "TrainingSetup",
    "alone",
    "apply",
    "build",
    "changing",
    "examples",
    "find_schemes",
    "lookup",
    "scheme_names",
    "with_packed_saved_tensors",
]


def apply(setup: TrainingSetup, scheme: str | Scheme) -> TrainingSetup:
    """Return a training setup with a scheme applied to its model, loss, optimizer and way to feed the batch.

    For example::

        setup = actbench.TrainingSetup(model, loss=loss, make_optimizer=lambda model: AdamW(model.parameters()))
        setup = actbench.apply(setup, "lora:16+adam8bit+accumulate:4")
        step = actbench.TrainStep(setup)
        for step.batch in batches:
            print(step())

    The model is changed in place.

    Args:
        setup: Needs a loss and ``make_optimizer`` if a step will run.
        scheme: A specification, or a scheme.

    Raises:
        SpecError: The specification is wrong.
        ModelError: A layer of the model waits for its first batch to know its shape.
        ConversionError: The scheme finds nothing to work on, or cannot work on the setup.
        MeasurementError: A package that the scheme needs is not installed.
    """
    check_argument(setup, TrainingSetup, "apply", "an actbench.TrainingSetup")
    check_module(setup.module, "a TrainingSetup")
    check_argument(scheme, (str, Scheme), "apply", "a specification such as 'fewbit:3', or a Scheme")
    refuse_lazy(setup.module)
    return (build(scheme) if isinstance(scheme, str) else scheme).apply(setup)
