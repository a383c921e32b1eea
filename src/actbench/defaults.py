"""What a case means that leaves the type or the optimizer to its model: models that have none of their own get these.

Only what a specification looks like counts, since records are read without torch and without the model.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

DTYPE: Final[Literal["float32"]] = "float32"
OPTIMIZER: Final[Literal["adamw"]] = "adamw"

_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_PLACE = re.compile(r"hf:.*|[.~].*|[^@]*[/\\].*", re.DOTALL)


def is_function(model: str) -> bool:
    """Return whether a model specification names a function of the user's own, ``file.py:function``."""
    return _FUNCTION.fullmatch(model) is not None


def brings_dtype(model: str) -> bool:
    """Return whether a model specification names one that has types of its own: a function, a folder, a hub's."""
    return is_function(model) or _PLACE.fullmatch(model) is not None


def with_dtype(data: Any) -> Any:
    """Return the fields of a case with a type in them, unless the model brings its own."""
    if not isinstance(data, dict) or data.get("dtype") is not None or brings_dtype(str(data.get("model"))):
        return data
    return {**data, "dtype": DTYPE}


def with_optimizer(data: Any) -> Any:
    """Return the fields of a case with an optimizer in them, unless the model may bring its own."""
    if not isinstance(data, dict) or data.get("optimizer") is not None or is_function(str(data.get("model"))):
        return data
    return {**data, "optimizer": OPTIMIZER}
