"""What the files held that a case names: their content decides what a case is, not their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from actbench.model.data import Data
from actbench.model.modelspecs import file_of_model
from actbench.model.records import Record
from actbench.paths import digest

Content = tuple[str | None, str | None]
"""The digests of the file of the model and of that of the device profile; None where there is none."""

_FUNCTIONS = re.compile(r"([^=+,:]*\.py):[A-Za-z_]\w*")


class Contents:
    """Digests of the files that cases name, each read once: a change counts from the next command on."""

    def __init__(self) -> None:
        self._digests: dict[str, str | None] = {}

    def of(self, case: Data) -> dict[str, str] | None:
        """Return the digest of each file that a case names and that is there, by its path; None for no file."""
        found = {name: self._digest(path) for name, path in _named(case)}
        return {name: each for name, each in found.items() if each is not None} or None

    def _digest(self, name: str) -> str | None:
        if name not in self._digests:
            self._digests[name] = digest(os.path.expanduser(name))
        return self._digests[name]


def content_of(record: Record[Any, Any]) -> Content:
    """Return what the files held that say what was built, and for which device; a scheme's own are left out."""
    if record.files is None:
        return None, None
    profile = getattr(record.case, "device_profile", None)
    script = getattr(record.case, "script", None)
    model = script.target if script else file_of_model(record.case.model)
    return record.files.get(model or ""), record.files.get(profile or "")


def shown_content(record: Record[Any, Any]) -> str | None:
    """Return the beginnings of these digests, as tables have them; None where there is no such file."""
    return " ".join(each[:7] for each in content_of(record) if each is not None) or None


def _named(case: Any) -> Iterator[tuple[str, str]]:
    """Yield the files that a case names, each with its path, which a module is not."""
    if script := getattr(case, "script", None):
        if script.file is not None:
            yield script.target, script.file
    elif file := file_of_model(getattr(case, "model", "")):
        yield file, file
    yield from ((file, file) for file in map(_of_scheme, _FUNCTIONS.findall(getattr(case, "scheme", ""))))
    if (getattr(case, "device_profile", None) or "").endswith(".toml"):
        yield case.device_profile, case.device_profile


def _of_scheme(text: str) -> str:
    """Return the file of a function in a list, whose items ``/`` separates, as it does the folders of a path."""
    steps = text.split("/")
    tails = ["/".join(steps[first:]) for first in range(len(steps))]
    return next((tail for tail in tails if os.path.isfile(os.path.expanduser(tail))), text)
