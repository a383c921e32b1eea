"""Convert, measure and compare schemes that save activation memory in training.

Every public name is loaded at its first use, so ``import actbench`` imports neither torch nor anything heavy::

    import actbench

    model = actbench.convert(model, "fewbit:3+randomized:0.2")
"""

from __future__ import annotations

import actbench.interrupts  # noqa: F401  (first, since Ctrl-C may come while the rest is imported)

# isort: split
import importlib
import types
from typing import TYPE_CHECKING, Any

from actbench import caches as _caches

if TYPE_CHECKING:
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
    from actbench.measuring.compared import measure
    from actbench.methods.fewbit.activation import own_activation
    from actbench.methods.fewbit.tables import table
    from actbench.methods.lora.lowrank import base_state_dict
    from actbench.model.records import Case
    from actbench.packing.samplegradients import samples
    from actbench.scheme import apply
    from actbench.scheme.conditions import Precision, Processes
    from actbench.scheme.setup import TrainingSetup, TrainStep
    from actbench.tools.convert.controller import Controller
    from actbench.tools.convert.folders import load_converted, save_converted
    from actbench.tools.convert.model import Conversion, conversion_of, convert
    from actbench.tools.fit.fit import fit
    from actbench.tools.script.simulate import simulate

    __version__: str

_HOMES = {
    "ActbenchError": "errors",
    "Case": "model.records",
    "Controller": "tools.convert.controller",
    "Conversion": "tools.convert.model",
    "ConversionError": "errors",
    "KernelError": "errors",
    "MeasurementError": "errors",
    "ModelError": "errors",
    "OutOfMemoryError": "errors",
    "Precision": "scheme.conditions",
    "Processes": "scheme.conditions",
    "RecipeError": "errors",
    "SpecError": "errors",
    "StoreError": "errors",
    "TrainStep": "scheme.setup",
    "TrainingSetup": "scheme.setup",
    "UsageError": "errors",
    "apply": "scheme",
    "base_state_dict": "methods.lora.lowrank",
    "conversion_of": "tools.convert.model",
    "convert": "tools.convert.model",
    "fit": "tools.fit.fit",
    "load_converted": "tools.convert.folders",
    "measure": "measuring.compared",
    "own_activation": "methods.fewbit.activation",
    "samples": "packing.samplegradients",
    "save_converted": "tools.convert.folders",
    "simulate": "tools.script.simulate",
    "table": "methods.fewbit.tables",
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
    "fit",
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
        if isinstance(value, types.FunctionType):
            from actbench.keywords import checking

            value = checking(value, f"actbench.{name}")
    else:
        raise AttributeError(f"module 'actbench' has no attribute {name!r}")
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%actbench`` to a notebook: ``%load_ext actbench``."""
    importlib.import_module("actbench.tools.notebook.magic").load(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
