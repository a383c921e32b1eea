"""Writes what the classes of schemes declare as data that need no torch: their parameters, and what they are in words.

The files are src/actbench/model/declared/schemes.json and src/actbench/cli/schemes.json:

python benchmarks/scheme_parameters.py
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, WrapValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from actbench import plugins
from actbench.cli import described
from actbench.model.declared.schemes import FILE
from actbench.scheme.base import Scheme
from actbench.scheme.registry import find_schemes

_NAMES = {bool: "bool", float: "float", int: "int", str: "str", type(None): "none", Any: "any"}
_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "allow_inf_nan")


def declarations() -> dict[str, Any]:
    """Return the declarations of actbench's own schemes."""
    return {name: _declaration(scheme) for name, scheme in _ours().items()}


def _ours() -> dict[str, type[Scheme]]:
    return {name: find_schemes()[name] for name, plugin in plugins.installed("schemes").items() if plugin.is_ours}


def words() -> str:
    """Return the text of the file of schemes in words."""
    texts = {name: described.described(scheme) for name, scheme in _ours().items()}
    return described.TEXTS.dump_json(texts, indent=1).decode() + "\n"


def text() -> str:
    """Return the file's text: a line for each parameter."""
    lines = []
    for name, each in declarations().items():
        fields = each.pop("parameters")
        rows = ",\n".join(f"   {json.dumps(key)}: {json.dumps(field)}" for key, field in fields.items())
        lines.append(f' {json.dumps(name)}: {json.dumps(each)[:-1]}, "parameters": {{\n{rows}}}}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _declaration(scheme: type[Scheme]) -> dict[str, Any]:
    decorators = scheme.__pydantic_decorators__.field_validators.values()
    converted = {field for each in decorators if each.info.mode != "after" for field in each.info.fields}
    parameters: dict[str, Any] = {}
    for key, field in scheme.model_fields.items():
        parameters[key] = {"type": "any" if key in converted else _written(field)}
        if field.default is not PydanticUndefined:
            parameters[key]["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return {
        "positional": scheme.positional,
        "changes": list(scheme.model_construct().changes),
        "is_example": scheme.card.is_example,
        "compiles": scheme.card.compiles,
        "shorthands": [dataclasses.asdict(each) for each in scheme.card.shorthands],
        "parameters": parameters,
    }


def _written(field: FieldInfo) -> Any:
    return _with_metadata(_type(field.annotation), field.metadata)


def _type(annotation: Any) -> Any:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is Literal:
        return {"literal": list(inner)}
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return {"tuple": _type(inner[0])}
    if origin in (Union, types.UnionType):
        return {"union": [_type(each) for each in inner]}
    if origin is Annotated:
        return _with_metadata(_type(inner[0]), inner[1:])
    raise TypeError(f"{annotation} cannot be declared without torch: write its type with plain types and limits")


def _with_metadata(inner: Any, metadata: Any) -> Any:
    found: dict[str, Any] = {}
    for each in metadata:
        for part in each.metadata if isinstance(each, FieldInfo) else [each]:
            found |= {key: value for key in _LIMITS if (value := getattr(part, key, None)) is not None}
            if isinstance(part, BeforeValidator | WrapValidator):
                found["before" if isinstance(part, BeforeValidator) else "wrap"] = _place(part.func)
            elif isinstance(part, AfterValidator):
                raise TypeError(f"{part.func} is a validator after: make it one of the field")
    return {"of": inner, **found} if found else inner


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    described.FILE.write_text(words(), encoding="utf-8")
