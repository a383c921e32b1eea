"""Checks specifications against the declared parameters of schemes, without importing torch.

``schemes.json`` holds what the classes of actbench's own schemes declare: ``benchmarks/scheme_parameters.py`` writes it
from them, and a test holds it equal. So a wrong name or key, and most wrong values, are refused at once; what a
validator of the whole scheme refuses is known when the scheme is built. Schemes of other packages are imported.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WrapValidator, create_model

from actbench import plugins
from actbench.errors import SpecError
from actbench.model import spec

FILE = Path(__file__).with_name("schemes.json")
_PLAIN: Mapping[str, Any] = {"any": Any, "bool": bool, "float": float, "int": int, "none": None, "str": str}
_VALIDATORS: Mapping[str, Any] = {"before": BeforeValidator, "wrap": WrapValidator}


@dataclass(frozen=True)
class Shorthand:
    """A flag of all verbs that take schemes; in ``spec``, the specification that it stands for, ``{}`` is its value."""

    flag: str
    spec: str
    metavar: str
    about: str

    @property
    def name(self) -> str:
        """The name of the flag's parameter."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def scheme(self) -> str:
        """The name of the scheme; ``{}`` if the value names it."""
        return self.spec.partition(":")[0]


@dataclass(frozen=True)
class _Scheme:
    """The fields of a scheme as a model, and the one that the value after the colon fills.

    ``is_whole`` says whether all fields have a default.
    """

    model: type[BaseModel]
    positional: str | None
    is_whole: bool


def check_scheme(text: str) -> None:
    """Check a specification of schemes, as far as can be known without torch.

    Raises:
        SpecError: A name, key or value is wrong; the message is the one of building the scheme.
    """
    parts = spec.parse_spec(text)
    for part in parts:
        spec.find_named(part.name, plugins.installed("schemes"), "scheme", text)
        if (found := _scheme(part.name)) is not None:
            about = f"scheme {text!r}"
            built = spec.build(found.model, found.positional, part, about, f" (see 'actbench schemes {part.name}')")
            spec.check_sizes(built, about)
    spec.check_apart([(part.name, "only" in part.options) for part in parts], text)


def spelled(text: str) -> tuple[str, ...] | None:
    """Return the parts of a specification as records have them, sorted; None if that is not known without torch.

    Equal parts are equal schemes. Unequal parts may be, where a scheme changes what it is given.
    """
    names = []
    for part in spec.parse_spec(text):
        if part.name not in declarations() or (found := _scheme(part.name)) is None or not found.is_whole:
            return None
        try:
            built = spec.build(found.model, found.positional, part, text)
            names.append(spec.shortest(part.name, found.positional, built))
        except SpecError:
            return None
    return tuple(sorted(names))


def examples(changes: Collection[str]) -> list[str]:
    """Return the names of the declared schemes that may change any of these, and that messages name as examples."""
    return [
        name
        for name, each in declarations().items()
        if each["is_example"] and not set(changes).isdisjoint(each["changes"])
    ]


def compilable() -> list[str]:
    """Return the names of the schemes that messages name where they say what ``torch.compile`` takes."""
    return [name for name, each in declarations().items() if each["compiles"]]


@functools.cache
def shorthands() -> tuple[Shorthand, ...]:
    """Return the flags that stand for schemes, in the order of the schemes' names."""
    return tuple(Shorthand(**flag) for each in declarations().values() for flag in each["shorthands"])


@functools.cache
def declarations() -> dict[str, Any]:
    """Return what ``schemes.json`` declares of each scheme, by name: parts of its card, and its parameters."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _scheme(name: str) -> _Scheme | None:
    """Return the parameters of an installed scheme; None if it cannot be imported, which is said when it is built."""
    plugin = plugins.installed("schemes")[name]
    if not plugin.is_ours or name not in declarations():
        if plugins.fault(plugin, type) or not issubclass(cls := plugin.load(), BaseModel):
            return None
        return _Scheme(cls, getattr(cls, "positional", None), is_whole=True)
    declared = declarations()[name]
    fields: dict[str, Any] = {}
    for key, each in declared["parameters"].items():
        default = each.get("default", ...)
        fields[key] = (_type(each["type"]), tuple(default) if isinstance(default, list) else default)
    is_whole = all("default" in each for each in declared["parameters"].values())
    return _Scheme(create_model(name, **fields), declared["positional"], is_whole)


def _type(declared: Any) -> Any:
    """Return the type that ``schemes.json`` writes as a name, or as a table of what it is made of."""
    if isinstance(declared, str):
        return _PLAIN[declared]
    match declared:
        case {"literal": values}:
            return Literal[tuple(values)]
        case {"tuple": item}:
            return tuple[_type(item), ...]  # type: ignore[misc]
        case {"union": members}:
            return functools.reduce(operator.or_, map(_type, members))
        case {"of": inner}:
            rest: dict[str, Any] = {key: value for key, value in declared.items() if key != "of"}
            checks = [_VALIDATORS[key](_function(rest.pop(key))) for key in _VALIDATORS if key in rest]
            return Annotated[(_type(inner), *([Field(**rest)] if rest else []), *checks)]
    raise ValueError(f"schemes.json: {declared!r} is no type")


def _function(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
