from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import typing
from typing import Any

from pydantic import ValidationError

from actbench import schemes, spec
from actbench.errors import SpecError
from actbench.schemes.base import Scheme


@functools.cache
def find() -> dict[str, type[Scheme]]:
    """Return every scheme by name, found by importing each file of this package."""
    for module in pkgutil.iter_modules(schemes.__path__):
        importlib.import_module(f"{schemes.__name__}.{module.name}")
    found = [cls for cls in _subclasses(Scheme) if cls.name]
    return {cls.name: cls for cls in sorted(found, key=lambda cls: cls.name)}


def names() -> list[str]:
    """Return the names of all schemes."""
    return list(find())


def lookup(name: str, text: str | None = None) -> type[Scheme]:
    """Return the scheme of a name.

    Args:
        name: The name.
        text: The specification that it stands in, for the message of the error.

    Raises:
        SpecError: There is no such scheme; the message names the closest one.
    """
    found = find().get(name)
    if found is None:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SpecError(f"scheme {(text or name)!r}: there is no scheme {name!r}; {hint}known: {', '.join(names())}")
    return found


def build(text: str) -> Scheme:
    """Build the scheme that a specification names; several joined by ``+`` become one composed scheme.

    Raises:
        SpecError: A name, key or value is wrong; the message names it and what is allowed.
    """
    from actbench.schemes.composed import Composed

    parts = [_build_part(part, text) for part in spec.parse(text)]
    if len(parts) == 1:
        return parts[0]
    return Composed.of(parts, text)


def _build_part(part: spec.Part, text: str) -> Scheme:
    cls = lookup(part.name, text)
    values: dict[str, Any] = dict(part.options)
    if part.value is not None:
        if cls.positional is None:
            raise SpecError(f"scheme {text!r}: {part.name} takes no value after the colon, found {part.value!r}")
        if cls.positional in values:
            raise SpecError(f"scheme {text!r}: {cls.positional} is given twice, after the colon and as a key")
        values[cls.positional] = part.value
    return _validated(cls, values, text)


def _validated(cls: type[Scheme], values: dict[str, Any], text: str) -> Scheme:
    for key in values:
        if key not in cls.model_fields:
            allowed = ", ".join(cls.model_fields) or "none"
            raise SpecError(f"scheme {text!r}: {cls.name} has no key {key!r}; its keys: {allowed}")
    try:
        return cls.model_validate(_split_lists(cls, values))
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors())
        raise SpecError(f"scheme {text!r}: {problems} (see 'actbench schemes {cls.name}')") from None


def _split_lists(cls: type[Scheme], values: dict[str, Any]) -> dict[str, Any]:
    """Turn ``a/b`` into ``("a", "b")`` for the fields that are tuples."""
    hints = typing.get_type_hints(cls)
    return {
        key: tuple(value.split("/")) if typing.get_origin(hints[key]) is tuple else value
        for key, value in values.items()
    }


def _problem(error: Any) -> str:
    place = ".".join(str(item) for item in error["loc"]) or "scheme"
    if error["type"] == "missing":
        return f"{place} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}={error['input']}: {message[0].lower()}{message[1:]}"


def _subclasses(cls: type[Scheme]) -> list[type[Scheme]]:
    return [sub for child in cls.__subclasses__() for sub in [child, *_subclasses(child)]]
