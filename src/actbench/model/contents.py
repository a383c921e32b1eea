"""The content of the files that a case names, which decides what the case is; their names do not.

The content of a script includes the files of Python below its folder that it imports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from actbench.model.data import Data
from actbench.model.importable import with_imported
from actbench.model.modelspecs import file_of_model
from actbench.model.records import Record
from actbench.paths import digest

Content = tuple[str | None, str | None]
"""The digests of the file of the model and of that of the device profile; None where there is none."""

_FUNCTIONS = re.compile(r"([^=+,:]*\.py):[A-Za-z_]\w*")


class Contents:
    """Digests of the files that cases name, each read once: a change counts from the next command on."""

    def __init__(self) -> None:
        self._digests: dict[_Named, str | None] = {}

    def of(self, case: Data) -> dict[str, str] | None:
        """Return the digest of each file that a case names and that is there, by its path; None for no file."""
        found = {named.name: self._digest(named) for named in _named(case)}
        return {name: each for name, each in found.items() if each is not None} or None

    def _digest(self, named: _Named) -> str | None:
        if named not in self._digests:
            path, folder = os.path.expanduser(named.path), named.imports_from
            found = digest(path)
            self._digests[named] = found if found is None or folder is None else with_imported(found, path, folder)
        return self._digests[named]


def content_of(record: Record[Any, Any]) -> Content:
    """Return the content of the files that say what was built and for which device, without a scheme's own files."""
    if record.files is None:
        return None, None
    profile = getattr(record.case, "device_profile", None)
    script = getattr(record.case, "script", None)
    model = script.target if script else file_of_model(record.case.model)
    return record.files.get(model or ""), record.files.get(profile or "")


def shown_content(record: Record[Any, Any]) -> str | None:
    """Return the beginnings of these digests, as tables have them; None where there is no such file."""
    return " ".join(each[:7] for each in content_of(record) if each is not None) or None


class _Named(NamedTuple):
    """A file as a case names it, its path, and for a script the folder from which it imports."""

    name: str
    path: str
    imports_from: str | None = None


def _named(case: Any) -> Iterator[_Named]:
    """Yield the files that a case names; of several of one name the last counts."""
    yield from (_Named(file, file) for file in map(_of_scheme, _FUNCTIONS.findall(getattr(case, "scheme", ""))))
    if (getattr(case, "device_profile", None) or "").endswith(".toml"):
        yield _Named(case.device_profile, case.device_profile)
    if script := getattr(case, "script", None):
        if script.file is not None:
            here = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.file))
            yield _Named(script.target, script.file, here)
    elif file := file_of_model(getattr(case, "model", "")):
        yield _Named(file, file)


def _of_scheme(text: str) -> str:
    """Return the file of a function in a list, whose items ``/`` separates, as it does the folders of a path."""
    steps = text.split("/")
    tails = ["/".join(steps[first:]) for first in range(len(steps))]
    return next((tail for tail in tails if os.path.isfile(os.path.expanduser(tail))), text)
