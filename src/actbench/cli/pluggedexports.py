"""The flags ``--export-NAME`` of formats that plug-ins bring, and the texts that they write."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actbench import plugins
from actbench.cli.app import file_option, panel_of
from actbench.errors import ActbenchError, StoreError, told
from actbench.plugins import Plugin
from actbench.report.exporting import Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.report.render.exports import Text

_TAKEN = ("markdown", "csv", "json", "curves", "timeline", "snapshot")


@functools.cache
def formats_plugged() -> dict[str, tuple[Plugin, ExportFormat]]:
    """Return the formats of files that plug-ins bring, by the name of the flag's parameter."""
    found = {}
    for name, made in plugins.loaded("exports", ExportFormat).items():
        plugin = plugins.installed("exports")[name]
        names_are_good = re.fullmatch(r"[a-z][a-z0-9-]*", name) and re.fullmatch(r"(--[a-z][a-z0-9-]+)?", made.also)
        if not names_are_good or name in _TAKEN or panel_of(made.also):
            plugins.leave_out(plugin, "exports", f"no flag can be --export-{name} {made.also}".rstrip())
        else:
            found[f"export_{name.replace('-', '_')}"] = plugin, made
    return found


def plugged_exports() -> dict[str, Any]:
    """Return the type of each flag of :func:`formats_plugged`, with its option."""
    return {
        parameter: Annotated[Path | None, file_option(f"--export-{plugin.name} {made.also}", made.about)]
        for parameter, (plugin, made) in formats_plugged().items()
    }


def text_of(name: str, exported: Callable[[], Exported]) -> Text:
    """Return the text of a plug-in's format; an error in its code is one of the export."""
    plugin, made = formats_plugged()[name]
    with _blaming(plugin):
        text = made.text(exported())
    return text if isinstance(text, str | bytes) else _lines_of(plugin, text)


def _lines_of(plugin: Plugin, lines: Iterable[str]) -> Iterator[str]:
    with _blaming(plugin):
        yield from lines


@contextmanager
def _blaming(plugin: Plugin) -> Iterator[None]:
    try:
        yield
    except (ActbenchError, OSError):
        raise
    except Exception as error:  # a stranger's code may raise anything
        raise StoreError(f"--export-{plugin.name}, which {plugin.package} brings, failed: {told(error)}") from error
