"""Lists of schemes, models, recipes and devices; and one scheme, explained from its class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from actbench.cli.app import argument, command
from actbench.cli.printing import console, plain_table
from actbench.errors import UsageError
from actbench.plugins import OURS, installed
from actbench.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from actbench.scheme import Scheme


@command()
def schemes(
    name: Annotated[str | None, argument("NAME", "Show one scheme with its keys, paper and published figures.")] = None,
) -> None:
    """List the schemes, or show one with its keys and the figures its authors published.

    Examples: actbench schemes · actbench schemes fewbit
    """
    from actbench import scheme as registry

    if name is None:
        found = registry.find_schemes()
        packages = {name: plugin.package for name, plugin in installed("schemes").items() if not plugin.is_ours}
        from_others = ["from"] if packages.keys() & found.keys() else []
        table = plain_table("scheme", "changes", "what it does", "paper", *from_others)
        for scheme in found.values():
            value = "" if scheme.positional is None else f":{scheme.positional.upper()}"
            package = [packages.get(scheme.name, OURS)] if from_others else []
            table.add_row(scheme.name + value, _changes(scheme), scheme.card.summary, scheme.card.paper, *package)
        console().print(table)
    else:
        print_scheme(registry.lookup(name), console())


@command()
def models(
    pattern: Annotated[str | None, argument("PATTERN", "Show only models whose name contains this.")] = None,
) -> None:
    """List the models that work by name without a network: presets, graph networks and torchvision's classifiers.

    Any other Hugging Face model works by its hub name or folder, and your own model as file.py:function.

    Examples: actbench models · actbench models resnet
    """
    from actbench import workload as workloads

    table = plain_table("model", "from", "trained for", "note")
    for entry in workloads.available():
        if pattern is None or pattern.lower() in entry.spec.lower():
            table.add_row(entry.spec, entry.source, entry.task, entry.note)
    if not table.row_count:
        raise UsageError(f"no model's name contains {pattern!r}; 'actbench models' lists all")
    console().print(table)


@command()
def recipes(
    name: Annotated[str | None, argument("NAME", "Print one recipe, to read it or to begin your own.")] = None,
) -> None:
    """List the recipes that ship with actbench, or print one.

    Examples: actbench recipes · actbench recipes quickstart > mine.toml
    """
    from actbench.run import recipes

    if name is not None:
        print((recipes.files_of(name) or recipes.Recipe.files).source(name), end="")
        return
    table = plain_table("recipe", "run by", "question")
    for kind in recipes.KINDS:
        for shipped in kind.names():
            table.add_row(shipped, kind.verb, kind.title(shipped))
    console().print(table)


@command()
def devices(
    pattern: Annotated[str | None, argument("PATTERN", "Show only devices whose name contains this.")] = None,
) -> None:
    """List the device profiles for --device-profile: a step is simulated for such a device, without having one.

    Memory is the number in torch's out-of-memory messages for such a card: less than is printed on the box. The driver
    also takes its share from it. `--memory-limit 8GiB` sets another limit. For devices marked est. the time of a step
    is estimated too.

    Examples: actbench devices · actbench measure roberta-base --device-profile rtx-4090
    """
    from actbench.simulator import profiles

    table = plain_table("device profile", "memory", "compute capability", "operators of", "time")
    for profile in profiles.profiles():
        if pattern is None or pattern.lower() in profile.name:
            capability = "–" if profile.compute_capability is None else "{}.{}".format(*profile.compute_capability)
            operators = "CUDA" if profile.is_cuda else "this CPU"
            usual = " (default)" if profile.name == profiles.DEFAULT else ""
            time = "–" if profile.rates is None else "est."
            table.add_row(profile.name + usual, format_bytes(profile.memory_bytes), capability, operators, time)
    if not table.row_count:
        raise UsageError(f"no device profile's name contains {pattern!r}; 'actbench devices' lists all")
    console().print(table)


_PADDING = (0, 2, 0, 0)
_PARTS = ("Paper", "Kept for backward", "Not reproduced")
_ENTRY = re.compile(r" {4}(\w+): (.*)")
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": "at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "at most {:g}",
    "exclusiveMaximum": "below {:g}",
}


def print_scheme(scheme: type[Scheme], to: Console) -> None:
    """Print what a scheme does and saves, its keys with allowed values, and its authors' figures."""
    from rich.table import Table

    text = _explained(scheme)
    value = "" if scheme.positional is None else f":{scheme.positional.upper()}"
    to.print(f"{scheme.name}{value}", style="bold", markup=False)
    to.print(text.pop(""), "", sep="\n", markup=False)
    text["Changes"] = _changes(scheme) or "nothing"
    facts = Table.grid("", "", padding=_PADDING)
    for title, fact in {**text, **_claims(scheme)}.items():
        facts.add_row(_literal(title), _literal(fact))
    to.print(facts)
    for table in (_keys(scheme), _published(scheme)):
        if table.row_count:
            to.print("", table)


def _explained(scheme: type[Scheme]) -> dict[str, str]:
    """Return the sections of the docstring by title; the text before the first has an empty title."""
    parts = {"": ""}
    title = ""
    for line in _documentation(scheme).partition("\nAttributes:\n")[0].splitlines():
        head, _, rest = line.partition(": ")
        if head in _PARTS:
            title, line = head, rest
        parts[title] = f"{parts.get(title, '')} {line}".strip()
    return parts


def _changes(scheme: type[Scheme]) -> str:
    return ", ".join(scheme.model_construct().changes)


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


def _keys(scheme: type[Scheme]) -> Any:
    from actbench.scheme.base import OF_PARTS, Scheme

    table = plain_table("key", "type", "default", "allowed", "meaning", padding=_PADDING)
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
        kind, allowed = _described(schema[key])
        table.add_row(*map(_literal, (key, kind, default, allowed, meaning)))
    return table


def _meanings(scheme: type[Scheme]) -> dict[str, str]:
    """Return the docstring's text about each key."""
    found: dict[str, str] = {}
    key = ""
    for line in _documentation(scheme).partition("\nAttributes:\n")[2].splitlines():
        entry = _ENTRY.fullmatch(line)
        key, words = entry.groups() if entry else (key, line.strip())
        found[key] = f"{found.get(key, '')} {words}".strip()
    return found


def _described(schema: dict[str, Any]) -> tuple[str, str]:
    """Return type and allowed values of a key from its JSON schema."""
    schema, *others = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"] or [schema]
    if schema.get("type") == "array":
        kind, allowed = _described(schema.get("items", {}))
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


def _published(scheme: type[Scheme]) -> Any:
    table = plain_table("published", "value", "setting", "source", padding=_PADDING)
    for figure in scheme.card.published:
        value = format_bytes(figure.value) if figure.quantity.endswith("_bytes") else f"{figure.value:g}"
        table.add_row(*map(_literal, (figure.quantity, value, figure.setting, figure.source)))
    return table


def _documentation(scheme: type[Scheme]) -> str:
    return (inspect.getdoc(scheme) or scheme.card.summary).replace("``", "")


def _literal(text: str) -> Any:
    from rich.text import Text

    return Text(text)
