from __future__ import annotations

from typing import Annotated, Any

from actbench.cli.app import app, argument
from actbench.cli.scheme import print_scheme
from actbench.errors import UsageError


@app.command()
def schemes(
    name: Annotated[str | None, argument("NAME", "Show one scheme with its keys, paper and published figures.")] = None,
) -> None:
    """List the schemes, or show one with its keys and the figures its authors published.

    Examples: actbench schemes · actbench schemes fewbit
    """
    from rich.console import Console

    from actbench import schemes as registry

    if name is None:
        table = _table("scheme", "what it does", "paper")
        for scheme in registry.find().values():
            value = "" if scheme.positional is None else f":{scheme.positional.upper()}"
            table.add_row(scheme.name + value, scheme.summary, scheme.paper)
        Console().print(table)
    else:
        print_scheme(registry.lookup(name), Console(highlight=False))


@app.command()
def models(
    pattern: Annotated[str | None, argument("PATTERN", "Show only models whose name contains this.")] = None,
) -> None:
    """List the models that work by name with no network: presets, graph networks and torchvision's classifiers.

    Any other Hugging Face model works by its hub name or folder, and a model of your own as file.py:function.

    Examples: actbench models · actbench models resnet
    """
    from rich.console import Console

    from actbench import workloads

    table = _table("model", "from", "trained for", "note")
    for entry in workloads.available():
        if pattern is None or pattern.lower() in entry.spec.lower():
            table.add_row(entry.spec, entry.source, entry.task, entry.note)
    if not table.row_count:
        raise UsageError(f"no model's name contains {pattern!r}; 'actbench models' lists all")
    Console().print(table)


@app.command()
def recipes(
    name: Annotated[str | None, argument("NAME", "Print one recipe, to read or to start one's own from.")] = None,
) -> None:
    """List the recipes that ship with actbench, or print one.

    Examples: actbench recipes · actbench recipes quickstart > mine.toml
    """
    from rich.console import Console

    from actbench import recipe, runs

    if name is not None:
        print(runs.source(name) if name in runs.names() else recipe.source(name), end="")
        return
    table = _table("recipe", "run by", "question")
    for verb, titles in (("sweep", recipe.shipped()), ("train", runs.shipped())):
        for shipped, title in titles.items():
            table.add_row(shipped, verb, title)
    Console().print(table)


def _table(*titles: str) -> Any:
    from rich.table import Table

    return Table(*titles, box=None, header_style="bold")
