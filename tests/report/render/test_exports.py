from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from actbench.errors import StoreError, UsageError
from actbench.report.render.exports import check_writable, export


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_several_files_are_written_and_folders_made(tmp_path: Path) -> None:
    export({tmp_path / "a.md": "µ\n", tmp_path / "new" / "b.csv": "b\n"})

    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "µ\n"
    assert files(tmp_path) == {"a.md", "new/b.csv"}


def test_lines_are_written_as_they_are_made(tmp_path: Path) -> None:
    made = 0

    def lines() -> Iterator[str]:
        nonlocal made
        for made in range(1, 1001):
            yield f"µ {made}\n"

    export({tmp_path / "a.md": lines()})

    assert made == 1000
    assert (tmp_path / "a.md").read_text().splitlines() == [f"µ {line}" for line in range(1, 1001)]


def test_when_the_lines_of_one_cannot_be_made_none_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("old")

    def lines() -> Iterator[str]:
        yield "new"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        export({tmp_path / "a.md": "new", tmp_path / "b.md": lines()})

    assert (tmp_path / "a.md").read_text() == "old"
    assert files(tmp_path) == {"a.md"}


def test_a_file_that_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("old and long")

    export({path: "new"})

    assert path.read_text() == "new"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.md").write_text("old")
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")

    export({tmp_path / "link.md": "new"})

    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "real.md").read_text() == "new"


def test_files_have_the_mode_that_any_new_file_has(tmp_path: Path) -> None:
    export({tmp_path / "a.md": "a"})
    (tmp_path / "b.md").touch()

    assert stat.S_IMODE((tmp_path / "a.md").stat().st_mode) == stat.S_IMODE((tmp_path / "b.md").stat().st_mode)


@pytest.mark.parametrize("bad", ["folder", "file/below.csv"])
def test_when_one_cannot_be_written_none_is(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a file")
    (tmp_path / "a.md").write_text("old")

    with pytest.raises(StoreError) as caught:
        export({tmp_path / "a.md": "new", tmp_path / bad: "new", tmp_path / "c.md": "new"})

    assert str(caught.value).startswith(str(tmp_path / bad))
    assert (tmp_path / "a.md").read_text() == "old"
    assert files(tmp_path) == {"a.md", "file"}


def test_one_file_for_two_exports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"two exports name the same file, .*a\.md"):
        export({tmp_path / "a.md": "one", tmp_path / "x" / ".." / "a.md": "two"})

    assert files(tmp_path) == set()


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        export({pipe: "through the pipe"})
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)

    assert pipe.is_fifo()


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")

    with pytest.raises(StoreError, match="is a folder: name a file in it"):
        check_writable(tmp_path)
    with pytest.raises(StoreError, match="is not a folder"):
        check_writable(file / "table.md")
    check_writable(file)
    check_writable(tmp_path / "new" / "table.md")
    check_writable(Path("/dev/stdout"))

    assert files(tmp_path) == {"file"}
