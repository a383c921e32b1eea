"""Lists of schemes, models, recipes and devices; and one scheme, explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from actbench.cli.app import argument, command
from actbench.cli.printing import console, plain_table
from actbench.errors import UsageError
from actbench.model.declared import other_names
from actbench.plugins import OURS, installed
from actbench.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from actbench.cli.described import SchemeText


@command(rank=130)
def schemes(
    name: Annotated[str | None, argument("NAME", "Show one scheme with its keys, paper and published figures.")] = None,
) -> None:
    """List the schemes, or show one with its keys and the figures its authors published.

    Examples: actbench schemes · actbench schemes fewbit
    """
    from actbench.cli import described

    if name is None:
        found = described.texts()
        packages = {name: plugin.package for name, plugin in installed("schemes").items() if not plugin.is_ours}
        from_others = ["from"] if packages.keys() & found.keys() else []
        table = plain_table("scheme", "changes", "what it does", "paper", *from_others)
        for each, text in found.items():
            package = [packages.get(each, OURS)] if from_others else []
            table.add_row(text.form, text.changes, text.title, text.paper, *package)
        console().print(table)
    else:
        print_scheme(described.text_of(name), console())


@command(rank=140)
def models(
    pattern: Annotated[str | None, argument("PATTERN", "Show only models whose name contains this.")] = None,
) -> None:
    """List the models that work by name without a network: presets, graph networks and torchvision's classifiers.

    Any other Hugging Face model works by its hub name or folder, and your own model as file.py:function.

    Examples: actbench models · actbench models resnet
    """
    from rich.markup import escape

    from actbench import workload as workloads

    table = plain_table("model", "from", "trained for", "note")
    for entry in workloads.available():
        if pattern is None or pattern.lower() in entry.spec.lower():
            table.add_row(entry.spec, entry.source, entry.task, escape(entry.note))
    if not table.row_count:
        raise UsageError(f"no model's name contains {pattern!r}; 'actbench models' lists all")
    console().print(table)


@command(rank=150)
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


_KINDS_OF_DEVICES: Final = ("any", "desktop", "workstation", "data centre")


def _kind_of_device(name: str) -> str:
    """Return what a device is made for, which the names of cards tell: an RTX with a letter is no GeForce."""
    if name in ("cpu", "cuda-16gib"):
        return "any"
    return "data centre" if not name.startswith("rtx-") else "workstation" if name.startswith("rtx-a") else "desktop"


@command(rank=160)
def devices(
    pattern: Annotated[str | None, argument("PATTERN", "Show only devices whose name contains this.")] = None,
) -> None:
    """List the device profiles for --device-profile: a step is simulated for such a device, without having one.

    Memory is the number in torch's out-of-memory messages for such a card: less than the nominal size. The driver takes
    its share from that number. `--memory-limit 8GiB` sets another limit. For devices marked est. the time of a step is
    estimated too. Names may be written as they are spoken, RTX 4090 or 4090, and some devices have others (also).

    Examples: actbench devices · actbench measure roberta-base --device-profile rtx-4090
    """
    from actbench.simulator import profiles

    table = plain_table("device profile", "memory", "compute capability", "operators of", "time", "kind", "also")
    found = [each for each in profiles.profiles() if pattern is None or pattern.lower() in each.name]
    for profile in sorted(found, key=lambda each: _KINDS_OF_DEVICES.index(_kind_of_device(each.name))):
        capability = "–" if profile.compute_capability is None else "{}.{}".format(*profile.compute_capability)
        operators = "CUDA" if profile.is_cuda else "this CPU"
        usual = " (default)" if profile.name == profiles.DEFAULT else ""
        time, kind = "–" if profile.rates is None else "est.", _kind_of_device(profile.name)
        memory, also = format_bytes(profile.memory_bytes), ", ".join(other_names(profile.name))
        table.add_row(profile.name + usual, memory, capability, operators, time, kind, also)
    if not table.row_count:
        raise UsageError(f"no device profile's name contains {pattern!r}; 'actbench devices' lists all")
    console().print(table)


_PADDING = (0, 2, 0, 0)


def print_scheme(text: SchemeText, to: Console) -> None:
    """Print what a scheme does and saves, its keys with allowed values, and its authors' figures."""
    from rich.table import Table
    from rich.text import Text

    to.print(text.form, style="bold", markup=False)
    to.print(text.summary, "", sep="\n", markup=False)
    facts = Table.grid("", "", padding=_PADDING)
    for title, fact in text.facts.items():
        facts.add_row(Text(title), Text(fact))
    to.print(facts)
    for header, rows in text.tables:
        table = plain_table(*header, padding=_PADDING)
        for row in rows:
            table.add_row(*map(Text, row))
        to.print("", table)
