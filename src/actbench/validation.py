"""Turns the errors of pydantic about a mapping into lines: the place, what was found, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]


def sentence(found: str, message: str) -> str:
    """Join what was found and a message of pydantic: ``ratio=2 must be at most 1``."""
    for said, short in (("less than or equal to", "at most"), ("greater than or equal to", "at least")):
        message = message.replace(said, short)
    subject, should, must = message.partition(" should ")
    if should and " " not in subject:  # "Input should be", "String should have"
        return f"{found} must {must}"
    return f"{found}: {message[0].lower()}{message[1:]}"


def dotted(location: Location) -> str:
    """Write a location as ``scheme[2].spec``, counted from 0."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.lstrip(".")


_FLAGS = {
    "model": "MODEL",
    "meters": "--meter",
    "largest_batch": "--max-batch",
    "spec": "--scheme",
    "scheme": "--scheme",
}


def flag(location: Location) -> str:
    """Write a location as its flag on the command line."""
    names = [step for step in location if isinstance(step, str)]
    return _FLAGS.get(names[-1], "--" + names[-1].replace("_", "-"))


def explain(
    error: ValidationError,
    data: Any,
    sections: Mapping[str, type[BaseModel]],
    place: Callable[[Location], str] = dotted,
) -> list[str]:
    """Return one line for each mistake.

    Args:
        error: What pydantic found.
        data: The validated data, as its author wrote them.
        sections: The pydantic model of each section by its key; the outermost has the key ``""``.
        place: Writes a location.
    """
    lines = []
    for detail in error.errors():
        location = _written(detail["loc"], data)
        if detail["type"] == "missing" and location and location[-1] in sections:
            lines.append(f"section [{dotted(location)}] is missing: write it as 'actbench recipes quickstart' does")
            continue
        problem = _problem(detail, location, sections)
        lines.append(f"{place(location)}: {problem}" if location else problem)
    return lines


def _written(location: Location, data: Any) -> Location:
    """Leave out the index that pydantic adds if the author wrote one value instead of a list."""
    kept: list[int | str] = []
    for step in location:
        if isinstance(step, int) and not isinstance(data, list | tuple):
            continue
        kept.append(step)
        try:
            data = data[step]
        except (LookupError, TypeError):
            data = None
    return tuple(kept)


def _problem(detail: ErrorDetails, location: Location, sections: Mapping[str, type[BaseModel]]) -> str:
    found = detail["input"]
    match detail["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return _unknown_key(location, sections)
        case "literal_error":
            return f"{found!r} is not one of {detail['ctx']['expected']}"
        case "too_short":
            return "is empty: write at least one value"
        case "value_error":
            return str(detail["ctx"]["error"])
        case "model_type":
            return f"{found!r} is not a table"
    return sentence(repr(found), detail["msg"])


def _unknown_key(location: Location, sections: Mapping[str, type[BaseModel]]) -> str:
    *outer, key = (step for step in location if isinstance(step, str))
    section = next((name for name in reversed(outer) if name in sections), "")  # a table may hold tables by name
    allowed = list(sections[section].model_fields)
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    elsewhere = (
        f"{known!r} is a key of {name!r}: write it there; "
        for name, model in sections.items()
        for known in (key, key.removesuffix("s"))
        if name not in ("", section) and known in model.model_fields
    )
    hint = hint or next(elsewhere, "")
    return f"unknown key; {hint}allowed: {', '.join(allowed)}"
