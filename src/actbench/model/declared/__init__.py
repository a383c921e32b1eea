"""What is known of schemes, models and devices without torch: wrong names are refused before torch is imported."""

from actbench.model.declared.names import (
    DEFAULT_DEVICE,
    check_model,
    device_named,
    device_names,
    model_names,
    other_names,
    unknown_model,
)
from actbench.model.declared.schemes import check_scheme, spelled

__all__ = [
    "DEFAULT_DEVICE",
    "check_model",
    "check_scheme",
    "device_named",
    "device_names",
    "model_names",
    "other_names",
    "spelled",
    "unknown_model",
]
