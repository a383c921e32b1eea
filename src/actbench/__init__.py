"""Convert, measure and compare schemes that save activation memory in training.

Every public name is loaded at its first use, so ``import actbench`` imports neither torch nor anything heavy::

    import actbench

    model = actbench.convert(model, "fewbit:3+randomized:0.2")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from actbench import caches as _caches

if TYPE_CHECKING:
    from actbench.codecs.activation import own_activation
    from actbench.codecs.tables import table
    from actbench.conversion.controller import Controller
    from actbench.conversion.folders import load_converted, save_converted
    from actbench.conversion.model import Conversion, conversion_of, convert
    from actbench.errors import (
        ActbenchError,
        ConversionError,
        KernelError,
        MeasurementError,
        ModelError,
        OutOfMemoryError,
        RecipeError,
        SpecError,
        StoreError,
        UsageError,
    )
    from actbench.measuring.bench import measure
    from actbench.nn.lowrank import base_state_dict
    from actbench.nn.saved.samplegradients import samples
    from actbench.results.records import Case
    from actbench.schemes import apply
    from actbench.script.simulation import simulate
    from actbench.setup import Precision, Processes, TrainingSetup, TrainStep

    __version__: str

_HOMES = {
    "ActbenchError": "errors",
    "Case": "results.records",
    "Controller": "conversion.controller",
    "Conversion": "conversion.model",
    "ConversionError": "errors",
    "KernelError": "errors",
    "MeasurementError": "errors",
    "ModelError": "errors",
    "OutOfMemoryError": "errors",
    "Precision": "setup",
    "Processes": "setup",
    "RecipeError": "errors",
    "SpecError": "errors",
    "StoreError": "errors",
    "TrainStep": "setup",
    "TrainingSetup": "setup",
    "UsageError": "errors",
    "apply": "schemes",
    "base_state_dict": "nn.lowrank",
    "conversion_of": "conversion.model",
    "convert": "conversion.model",
    "load_converted": "conversion.folders",
    "measure": "measuring.bench",
    "own_activation": "codecs.activation",
    "samples": "nn.saved.samplegradients",
    "save_converted": "conversion.folders",
    "simulate": "script.simulation",
    "table": "codecs.tables",
}

_caches.keep_compiled_code_private()  # before anything imports torch's compiler, which then chooses a folder

__all__ = [
    "ActbenchError",
    "Case",
    "Controller",
    "Conversion",
    "ConversionError",
    "KernelError",
    "MeasurementError",
    "ModelError",
    "OutOfMemoryError",
    "Precision",
    "Processes",
    "RecipeError",
    "SpecError",
    "StoreError",
    "TrainStep",
    "TrainingSetup",
    "UsageError",
    "__version__",
    "apply",
    "base_state_dict",
    "conversion_of",
    "convert",
    "load_converted",
    "measure",
    "own_activation",
    "samples",
    "save_converted",
    "simulate",
    "table",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        value: Any = metadata.version("actbench")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"actbench.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'actbench' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
