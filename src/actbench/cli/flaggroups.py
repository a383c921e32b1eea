"""Groups of flags: dataclasses whose fields are flags of a verb.

A field with ``flags`` among its metadata, a function that returns types by name, stands for the flags of plug-ins: its
value has theirs by name.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


@functools.cache
def _hints(group: type[Any]) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)  # compiles each, and many verbs share a group


def parameters_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter for each flag of a group; the parameter itself if it is none."""
    group = parameter.annotation
    if not (is_dataclass(group) and isinstance(group, type)):
        return [parameter]
    hints = _hints(group)
    found = []
    for field in fields(group):
        if "flags" in field.metadata:
            plugged = field.metadata["flags"]().items()
            found += [parameter.replace(name=name, default=None, annotation=hint) for name, hint in plugged]
        else:
            found.append(parameter.replace(name=field.name, default=field.default, annotation=hints[field.name]))
    return found


def made_of(group: type[Any], given: dict[str, Any]) -> Any:
    """Return a group of flags with its values from ``given``."""
    values: dict[str, Any] = {}
    for field in fields(group):
        if "flags" in field.metadata:  # a function that returns the flags that plug-ins bring
            values[field.name] = {name: given.pop(name) for name in field.metadata["flags"]()}
        else:
            values[field.name] = given.pop(field.name)
    return group(**values)
