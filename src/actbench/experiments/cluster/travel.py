"""Which files of the user's own the cases of a sweep name: they travel to the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from actbench.errors import UsageError
from actbench.results.records import Case

_NAMED = re.compile(r"[^\s,+=:/][^\s,+=:]*\.(?:py|toml)\b|/[^\s,+=:]*\.(?:py|toml)\b")
_MOST_BYTES = 2**20


def files_of(cases: Iterable[Case]) -> dict[str, str]:
    """Return the text of each ``.py`` and ``.toml`` file that models, schemes or device profiles name, by its path.

    A path that begins at the root is left to the nodes, which may share a file system.

    Raises:
        UsageError: A file is above the current folder, is not text, or has more than 1 MiB.
    """
    texts = dict.fromkeys(text for case in cases for text in (case.model, case.scheme, case.device_profile or ""))
    names = dict.fromkeys(found[0] for text in texts for found in _NAMED.finditer(text))
    return {name: _text(name) for name in names if not os.path.isabs(name) and Path(name).is_file()}


def _text(name: str) -> str:
    if os.path.relpath(Path(name).resolve(), Path.cwd().resolve()).startswith(os.pardir):
        raise UsageError(f"--cluster: {name} is outside of the current folder, and does not travel to the nodes")
    content = Path(name).read_bytes()
    if len(content) > _MOST_BYTES:
        raise UsageError(f"--cluster: {name} has {len(content):,} bytes; files of at most 1 MiB travel to nodes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--cluster: {name} is no text ({error.reason}), and does not travel to the nodes") from None
