"""Which files of the user's own the cases of a sweep name: they travel to the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from actbench.errors import UsageError
from actbench.results.records import Case

_MOST_BYTES = 2**20


def files_of(cases: Iterable[Case]) -> dict[str, str]:
    """Return the text of each ``.py`` and ``.toml`` file that models, schemes or device profiles name, by its path.

    A path that begins at the root, or with ``~``, is left to the nodes, which may share a file system.

    Raises:
        UsageError: A file is above the current folder, is not text, or has more than 1 MiB.
    """
    names = dict.fromkeys(name for case in cases for name in _named(case))
    ours = (name for name in names if not os.path.isabs(name) and not name.startswith("~"))
    return {name: _text(name) for name in ours if Path(name).is_file()}  # the node says of others that they are missing


def _named(case: Case) -> Iterator[str]:
    from actbench import schemes  # and with them torch, which only a sweep needs

    for spec in (case.model, *schemes.build(case.scheme).runs_files):
        file, _, name = spec.rpartition(":")
        if name and file.endswith(".py"):
            yield file
    if case.device_profile is not None and case.device_profile.endswith(".toml"):
        yield case.device_profile


def _text(name: str) -> str:
    if not Path(name).resolve().is_relative_to(Path.cwd().resolve()):
        raise UsageError(f"--cluster: {name} is outside of the current folder, and does not travel to the nodes")
    content = Path(name).read_bytes()
    if len(content) > _MOST_BYTES:
        raise UsageError(f"--cluster: {name} has {len(content):,} bytes; files of at most 1 MiB travel to nodes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--cluster: {name} is no text ({error.reason}), and does not travel to the nodes") from None
