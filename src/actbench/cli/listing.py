from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

from actbench.cli.app import app, argument
from actbench.errors import UsageError
from actbench.units import format_bytes

if TYPE_CHECKING:
    from actbench.schemes import Scheme


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
        _print_scheme(registry.lookup(name))


def _print_scheme(scheme: type[Scheme]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(inspect.getdoc(scheme) or scheme.summary, markup=False)
    keys = _table("key", "type", "default")
    for key, field in scheme.model_fields.items():
        kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
        default = "needed" if field.is_required() else str(field.get_default(call_default_factory=True))
        keys.add_row(key, kind.replace("typing.", ""), default)
    if keys.row_count:
        console.print("\n", keys)
    published = _table("published", "value", "setting", "source")
    for figure in scheme.published:
        value = format_bytes(figure.value) if figure.quantity.endswith("_bytes") else f"{figure.value:g}"
        published.add_row(figure.quantity, value, figure.setting, figure.source)
    if published.row_count:
        console.print("\n", published)


@app.command()
def models(
    pattern: Annotated[str | None, argument("PATTERN", "Show only models whose name contains this.")] = None,
) -> None:
    """List the models that work by name with no network: presets and torchvision's classifiers.

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

    from actbench import recipe

    if name is not None:
        print(recipe.source(name), end="")
        return
    table = _table("recipe", "question")
    for shipped, title in recipe.shipped().items():
        table.add_row(shipped, title)
    Console().print(table)


def _table(*titles: str) -> Any:
    from rich.table import Table

    return Table(*titles, box=None, header_style="bold")
