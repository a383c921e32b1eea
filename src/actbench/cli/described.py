"""A scheme in words, from its class: for ``actbench schemes``, and for the site's page of schemes.

``schemes.json`` beside this file has the words of actbench's own schemes, so that no class of theirs is imported, nor
torch: ``make parameters`` writes it from the classes, and a test holds it equal.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from actbench.errors import message_of
from actbench.model import spec
from actbench.plugins import Plugin, installed, leave_out
from actbench.units import format_bytes

if TYPE_CHECKING:
    from actbench.scheme import Scheme

FILE = Path(__file__).with_name("schemes.json")

Row = tuple[str, ...]

_PARTS = ("Paper", "Kept for backward", "Not reproduced")
_ENTRY = re.compile(r" {4}(\w+): (.*)")
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": "at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "at most {:g}",
    "exclusiveMaximum": "below {:g}",
}


@dataclass(frozen=True)
class SchemeText:
    """A scheme in words.

    Attributes:
        form: How it is written in a specification: ``fewbit:BITS``.
        title: What it does in a line, for lists.
        changes: What it changes; empty for nothing.
        paper: Source of the method; empty if there is none.
        summary: What it does.
        facts: Paper, what it keeps for backward, what it changes, and so on, by title.
        tables: The header and the rows of its keys, and of the figures that its authors published; none is empty.
    """

    form: str
    title: str
    changes: str
    paper: str
    summary: str
    facts: dict[str, str]
    tables: tuple[tuple[Row, list[Row]], ...]


TEXTS = TypeAdapter(dict[str, SchemeText])


def texts() -> dict[str, SchemeText]:
    """Return every scheme in words by name; one of another package that cannot be used is warned of and left out."""
    found = {name: _text(plugin) for name, plugin in installed("schemes").items()}
    return {name: text for name, text in found.items() if text is not None}


def text_of(name: str) -> SchemeText:
    """Return one scheme in words.

    Raises:
        SpecError: There is no such scheme; the message names the closest one.
    """
    plugin = installed("schemes").get(name)
    return (None if plugin is None else _text(plugin)) or spec.find_named(name, texts(), "scheme", name)


def _text(plugin: Plugin) -> SchemeText | None:
    if plugin.is_ours and plugin.name in _ours():
        return _ours()[plugin.name]
    if why := _fault(plugin):
        leave_out(plugin, "schemes", why)
        return None
    return described(plugin.load())


@functools.cache
def _ours() -> dict[str, SchemeText]:
    return TEXTS.validate_json(FILE.read_bytes())


def _fault(plugin: Plugin) -> str | None:
    try:
        from actbench.scheme.registry import fault
    except ImportError as error:  # there is no torch
        return f"it cannot be imported: {message_of(error)}"
    return fault(plugin)


def described(scheme: type[Scheme]) -> SchemeText:
    """Return a scheme in words."""
    sections = _sections(scheme)
    tables = (
        (("key", "type", "default", "allowed", "meaning"), list(_keys(scheme))),
        (("published", "value", "setting", "source"), list(_published(scheme))),
    )
    extras = "; ".join(f"{name}, for {purpose}" for name, purpose in scheme.card.extras.items())
    return SchemeText(
        form=form_of(scheme),
        title=scheme.card.summary,
        changes=changes_of(scheme),
        paper=scheme.card.paper,
        summary=sections.pop(""),
        facts={
            **sections,
            "Changes": changes_of(scheme) or "nothing",
            **_claims(scheme),
            **({"Extras": extras} if extras else {}),
        },
        tables=tuple((header, rows) for header, rows in tables if rows),
    )


def form_of(scheme: type[Scheme]) -> str:
    """Return how a scheme is written in a specification."""
    return scheme.name if scheme.positional is None else f"{scheme.name}:{scheme.positional.upper()}"


def changes_of(scheme: type[Scheme]) -> str:
    """Return what a scheme changes, as a list in words."""
    return ", ".join(scheme.model_construct().changes)


def _sections(scheme: type[Scheme]) -> dict[str, str]:
    """Return the sections of the docstring by title; the text before the first has an empty title."""
    parts = {"": ""}
    title = ""
    for line in _documentation(scheme).partition("\nAttributes:\n")[0].splitlines():
        head, _, rest = line.partition(": ")
        if head in _PARTS:
            title, line = head, rest
        parts[title] = f"{parts.get(title, '')} {line}".strip()
    return parts


def _claims(scheme: type[Scheme]) -> dict[str, str]:
    from actbench import scheme as registry
    from actbench.scheme.facets import LossyForward, Packs

    needed = any(field.is_required() for field in scheme.model_fields.values())
    usual = registry.build(scheme.name + scheme.card.variants_for(1)[0]) if needed else scheme()
    found = {"Forward pass": "exact, bit for bit"}
    if usual.facet(LossyForward):
        found["Forward pass"] = "not bit for bit that of the exact model"
    if packs := usual.facet(Packs):
        found["Bits per packed element"] = f"{packs.bits:g} ({usual.spec})"
    return found


def _keys(scheme: type[Scheme]) -> Iterator[Row]:
    from actbench.scheme.base import OF_PARTS, Scheme

    meanings = _meanings(Scheme) | _meanings(scheme)
    schema = scheme.model_json_schema(mode="validation").get("properties", {})
    can_be_limited = not OF_PARTS.isdisjoint(scheme.model_construct().changes)
    for key, field in scheme.model_fields.items():
        if key == "only" and not can_be_limited:
            continue
        default = "needed" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        meaning = meanings.get(key, "")
        if key == scheme.positional:
            meaning = f"{meaning} Stands after the colon."
        yield (key, _typed(schema[key])[0], default, _typed(schema[key])[1], meaning)


def _meanings(scheme: type[Scheme]) -> dict[str, str]:
    """Return the docstring's text about each key."""
    found: dict[str, str] = {}
    key = ""
    for line in _documentation(scheme).partition("\nAttributes:\n")[2].splitlines():
        entry = _ENTRY.fullmatch(line)
        key, words = entry.groups() if entry else (key, line.strip())
        found[key] = f"{found.get(key, '')} {words}".strip()
    return found


def _typed(schema: dict[str, Any]) -> tuple[str, str]:
    """Return type and allowed values of a key from its JSON schema."""
    schema, *others = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"] or [schema]
    if schema.get("type") == "array":
        kind, allowed = _typed(schema.get("items", {}))
        return "list, joined by /", allowed or kind
    kind = _TYPES.get(schema.get("type", ""), "text")
    return kind, " or ".join(filter(None, (", ".join(_allowed(each)) for each in (schema, *others))))


def _allowed(schema: dict[str, Any]) -> Iterator[str]:
    yield from map(str, schema.get("enum", [schema["const"]] if "const" in schema else ()))
    yield from (words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "–"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _published(scheme: type[Scheme]) -> Iterator[Row]:
    for figure in scheme.card.published:
        value = format_bytes(figure.value) if figure.quantity.endswith("_bytes") else f"{figure.value:g}"
        yield (figure.quantity, value, figure.setting, figure.source)


def _documentation(scheme: type[Scheme]) -> str:
    return (inspect.getdoc(scheme) or scheme.card.summary).replace("``", "")
