"""Writes files: the old files stay until every text is on disk, and no file is ever half-written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from actbench.errors import StoreError, UsageError
from actbench.paths import check_makeable
from actbench.tempfiles import file_next_to

Text = str | bytes | Iterable[str]
"""A text, the bytes of a picture, or the lines of a text, made as they are written."""


def check_writable(path: Path) -> None:
    """Check beforehand, as far as possible, that a file can be written.

    Raises:
        StoreError: The path is a folder or a link to nothing, or its parent folder cannot be made or written.
    """
    if os.path.isdir(path):
        raise StoreError(_is_a_folder(path.resolve()))
    if os.path.isfile(path) or not os.path.exists(path):  # a pipe or a device needs no new file
        check_makeable(path)


def check_apart(paths: Iterable[Path]) -> None:
    """Check that each path is a file of its own; a UsageError if two are the same."""
    seen: set[str] = set()
    for path in paths:
        target = os.path.realpath(path)  # of a circle of links, too, which Path.resolve refuses
        if target in seen:
            raise UsageError(f"two exports name the same file, {path}: give each a file of its own")
        seen.add(target)


def export(texts: Mapping[Path, Text]) -> None:
    """Write each text to its path, and make missing folders; a pipe or a device, such as /dev/stdout, also works.

    Raises:
        UsageError: Two paths are the same file.
        StoreError: A path cannot be written. Old files are unchanged, unless the disk failed at the very end, when
            finished files replace them.
    """
    check_apart(texts)
    targets = [Path(os.path.realpath(path)) for path in texts]
    streams = [target for target in targets if target.exists() and not (target.is_file() or target.is_dir())]
    staged: list[tuple[Path, Path]] = []
    target = Path()
    try:
        with ExitStack() as held:
            for target, text in zip(targets, texts.values(), strict=True):
                if target in streams:
                    with target.open("wb") as file:
                        file.writelines(_encoded(text))
                else:
                    staged.append((_staged(target, text, held), target))
            for temporary, target in staged:
                temporary.replace(target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from None


def _encoded(text: Text) -> Iterator[bytes]:
    if isinstance(text, bytes):
        yield text
    elif isinstance(text, str):
        yield text.encode()
    else:
        yield from (line.encode() for line in text)


def _is_a_folder(target: Path) -> str:
    return f"{target} is a folder: name a file in it, such as {target / 'table.md'}"


def _staged(target: Path, text: Text, held: ExitStack) -> Path:
    """Write a text beside its target and sync it; ``held`` removes it in the end."""
    if target.is_dir():
        raise StoreError(_is_a_folder(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, file = held.enter_context(file_next_to(target))
    file.writelines(_encoded(text))
    file.flush()
    os.fsync(file.fileno())
    return temporary
