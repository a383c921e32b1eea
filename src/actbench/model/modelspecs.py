"""What the text of a model specification says without the model: records are read without torch."""

from __future__ import annotations

import re
from typing import Final, Literal

# Models without their own dtype or optimizer get these. The form of the specification decides, since records are read
# without torch and without the model.
DTYPE: Final[Literal["float32"]] = "float32"
OPTIMIZER: Final[Literal["adamw"]] = "adamw"

_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_PLACE = re.compile(r"hf:.*|[.~].*|[^@]*[/\\].*", re.DOTALL)


def is_function(model: str) -> bool:
    """Return whether a model specification names a function of the user's own, ``file.py:function``."""
    return _FUNCTION.fullmatch(model) is not None


def brings_dtype(model: str) -> bool:
    """Return whether a model specification names a model with its own dtype: a function, a folder or one of the hub."""
    return is_function(model) or _PLACE.fullmatch(model) is not None


def dtype_for(model: str) -> Literal["float32"] | None:
    """Return the default dtype of a model's weights; None if the model brings its own."""
    return None if brings_dtype(model) else DTYPE


def optimizer_for(model: str) -> Literal["adamw"] | None:
    """Return the default optimizer of a model; None if the model may bring its own."""
    return None if is_function(model) else OPTIMIZER


def file_of_model(model: str) -> str | None:
    """Return the file that a model specification names: of a function, or the config of a folder; None for others."""
    if is_function(model):
        return model.rpartition(":")[0]
    if _PLACE.fullmatch(model):
        return f"{model.partition('@')[0].removeprefix('hf:')}/config.json"
    return None
