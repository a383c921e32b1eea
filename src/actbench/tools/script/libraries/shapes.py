"""Parameters of a transformers model that have shapes and no values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from actbench.errors import MeasurementError

_PACKED = ("llm_int8", "fp4", "nf4", "bitsandbytes")


def loading(module: ModuleType) -> Callable[[Any], Any]:
    """Return the change of ``PreTrainedModel._load_pretrained_model``, given the module that it stands in."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def load(
            model: Any,
            state_dict: Any,
            checkpoint_files: Any = None,
            load_config: Any = None,
            expected_keys: Any = None,
            **options: Any,
        ) -> Any:
            if state_dict is not None:
                return own(model, state_dict, checkpoint_files, load_config, expected_keys, **options)
            if expected_keys is None:  # else of an adapter, which has its shapes
                fill(model, load_config)
            # transformers' report of a model whose weights were all found
            empty, info = {"error_msgs": list, "conversion_errors": dict}, module.LoadStateDictInfo
            return info(**{field.name: empty.get(field.name, set)() for field in dataclasses.fields(info)}), None

        return load

    return change


def fill(model: Any, load_config: Any) -> None:
    """Give each parameter and saved buffer of a model that was just built its shape on the requested device.

    Parameters of bitsandbytes' layers are quantized, as far as shapes go.

    Raises:
        MeasurementError: The weights are to be quantized by another library than bitsandbytes.
    """
    quantizer = load_config.hf_quantizer
    if quantizer is not None and _method(quantizer) not in _PACKED:
        raise MeasurementError(
            f"quantization_config of method {_method(quantizer)!r} is not simulated; bitsandbytes' 4 and 8 bits are"
        )
    device = (load_config.device_map or {}).get("", "cpu")
    for owner, name, path in list(_unfilled(model)):
        own = getattr(owner, name)
        if quantizer is not None and quantizer.param_needs_quantization(model, path):
            made: Tensor = _quantized(own, load_config.dtype, device)
        else:
            dtype = _kept(path, load_config.dtype_plan) or own.dtype
            fresh = torch.ones if dtype.is_floating_point else torch.zeros
            made = fresh(own.shape, dtype=dtype, device=device)
            if name in owner._parameters:
                made = nn.Parameter(made, requires_grad=own.requires_grad and dtype.is_floating_point)
        made._is_hf_initialized = True  # type: ignore[attr-defined]  # so that no time goes into random values
        setattr(owner, name, made)


def _method(quantizer: Any) -> str:
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _unfilled(model: Any) -> Iterator[tuple[nn.Module, str, str]]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # they get the tensor of another one
    for prefix, owner in model.named_modules():
        saved = [name for name in owner._buffers if name not in owner._non_persistent_buffers_set]
        for name in [*owner._parameters, *saved]:
            path = f"{prefix}.{name}" if prefix else name
            if getattr(owner, name) is not None and path not in tied:
                yield owner, name, path


def _quantized(own: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a parameter of bitsandbytes like ``own``, which has no values, quantized on ``device``."""
    settings = {key: value for key, value in vars(own).items() if key not in ("SCB", "CB") and key[:1] != "_"}
    bare = torch.ones(own.shape, dtype=dtype, device="cpu")
    made: Tensor = type(own)(bare, requires_grad=False, **settings).to(device)
    return made


def _kept(path: str, plan: dict[str, torch.dtype] | None) -> torch.dtype | None:
    """Return the type that the model keeps a parameter in, or None if it has none of its own."""
    parts = path.split(".")
    return next(
        (dtype for pattern, dtype in (plan or {}).items() if pattern in parts or re.search(_regex(pattern), path)), None
    )


def _regex(pattern: str) -> str:
    return rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '.*')}($|\.)"
