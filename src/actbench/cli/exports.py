"""The flags ``--export-NAME`` of formats that plug-ins add, and the texts that they write."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actbench import plugins
from actbench.cli.app import file_option
from actbench.cli.panels import WITHOUT_PANEL, panel_of
from actbench.errors import ActbenchError, StoreError, message_of
from actbench.plugins import Plugin
from actbench.report.exporting import Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.report.render.exports import Text

_TAKEN = (
    "markdown",
    "csv",
    "json",
    "junit",
    "curves",
    "timeline",
    "snapshot",
    "trace",
    "flamegraph",
    "speedscope",
    "perfetto",
)
_NAME, _ALSO = re.compile(r"[a-z][a-z0-9-]*"), re.compile(r"(--[a-z][a-z0-9-]+)?")


@functools.cache
def formats_plugged() -> dict[str, tuple[Plugin, ExportFormat]]:
    """Return the formats of files that plug-ins bring, by the name of the flag's parameter."""
    brought = plugins.installed("exports")
    return {
        f"export_{name.replace('-', '_')}": (brought[name], made)
        for name, made in plugins.loaded("exports", fault).items()
    }


def fault(plugin: Plugin) -> str | None:
    """Return why a plug-in cannot be a format with flags; None if it can."""
    if why := plugins.fault(plugin, ExportFormat):
        return why
    name, also = plugin.name, plugin.load().also
    if not _can_be_flags(name, also):
        return f"no flag can be --export-{name} {also}".rstrip()
    first = _first_by_flag().get(also, plugin)
    return None if first is plugin else f"--export-{first.name} of {first.package} is {also} already"


def _can_be_flags(name: str, also: str) -> bool:
    if not (_NAME.fullmatch(name) and isinstance(also, str) and _ALSO.fullmatch(also)) or name in _TAKEN:
        return False
    flags_of_all = {f"--export-{each}" for each in plugins.installed("exports")}
    return not (panel_of(also) or also in WITHOUT_PANEL.split() or also in flags_of_all)


@functools.cache
def _first_by_flag() -> dict[str, Plugin]:
    """Return the plug-in that has each second name of a flag: of two with one name actbench's, or that of the first."""
    by_flag: dict[str, list[Plugin]] = {}
    for name, plugin in plugins.installed("exports").items():
        if plugins.fault(plugin, ExportFormat) is None:
            also = plugin.load().also
            if also and _can_be_flags(name, also):
                by_flag.setdefault(also, []).append(plugin)
    # whose a plug-in is takes a file to read, and as a rule no two are equal
    return {
        also: found[0] if len(found) == 1 else min(found, key=lambda each: each.precedence)
        for also, found in by_flag.items()
    }


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
        raise StoreError(
            f"--export-{plugin.name}, which {plugin.package} brings, failed: {message_of(error)}"
        ) from error
