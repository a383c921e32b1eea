"""What a node makes of the files that travel to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from actbench.errors import MeasurementError
from actbench.model.sources import sources
from actbench.tools.cluster import node

FILES = {"models/own.py": "# größer\n" * 1000, "card.toml": 'name = "card"\n'}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the cache folder of the node; the current folder comes back with the end of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    node.prepare.cache_clear()
    yield tmp_path
    node.prepare.cache_clear()


def prepared(files: dict[str, str]) -> Path:
    node.prepare.cache_clear()  # as another worker
    node.prepare(node.Shared(files=files, sources=sources()).model_dump_json())
    return Path.cwd()


def held(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_workers_share_a_folder_for_the_same_files(cache: Path) -> None:
    first, again = prepared(FILES), prepared(dict(reversed(FILES.items())))
    other, none = prepared({**FILES, "card.toml": ""}), prepared({})

    assert first == again
    assert len({first, other, none}) == 3
    assert held(first) == FILES
    assert held(other) == {**FILES, "card.toml": ""}
    assert held(none) == {}
    assert len(list(first.parent.iterdir())) == 3
    assert cache in first.parents


def test_what_is_missing_or_changed_in_the_folder_is_put_right(cache: Path) -> None:
    folder = prepared(FILES)
    (folder / "card.toml").unlink()
    (folder / "models" / "own.py").write_text("half")

    assert prepared(FILES) == folder
    assert held(folder) == FILES


def test_a_worker_that_is_killed_leaves_nothing_of_its_own(cache: Path, tmp_path: Path) -> None:
    shared = node.Shared(files=FILES, sources=sources()).model_dump_json()
    code = (
        "import os, signal, sys; from actbench.tools.cluster import node; node.prepare(sys.argv[1]); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code, shared], env={**os.environ, "TMPDIR": str(temporary)})
        assert done.returncode == -signal.SIGKILL

    assert list(temporary.iterdir()) == []
    assert [held(folder) for folder in (cache / "actbench" / "cluster").iterdir()] == [FILES]


def test_workers_that_begin_at_once_find_whole_files() -> None:
    with multiprocessing.get_context("fork").Pool(4) as workers:
        folders = workers.map(prepared, [FILES] * 16, chunksize=1)

    assert len(set(folders)) == 1
    assert held(folders[0]) == FILES


def test_a_cache_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))

    with pytest.raises(MeasurementError, match=r"cannot make the folder .*let XDG_CACHE_HOME name one"):
        prepared(FILES)


def test_a_node_with_another_actbench_refuses() -> None:
    request = node.Request(cases=(), timeout_seconds=None)
    shared = node.Shared(files={}, sources="other")

    with pytest.raises(MeasurementError, match=r"another actbench .* install the same on all nodes"):
        node.measure(request.model_dump_json(), shared.model_dump_json())


def test_another_gpu_or_folder_or_number_of_threads_gets_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of Ray's does tasks that see different devices, and its server has the environment that it began in."""
    made: list[str] = []

    class Server:
        def __init__(self, bench: str, preload: tuple[str, ...]) -> None:
            self.name = bench
            made.append(f"begin {bench}")

        def close(self) -> None:
            made.append(f"end {self.name}")

    (tmp_path / "other").mkdir()
    monkeypatch.setattr(node, "ForkServer", Server)
    serving = node._Serving()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first = serving.server("a", ())
    assert serving.server("a", ()) is first
    for name, value in (("CUDA_VISIBLE_DEVICES", "1"), ("OMP_NUM_THREADS", "8")):
        monkeypatch.setenv(name, value)
        assert serving.server("a", ()) is not first
    monkeypatch.chdir(tmp_path / "other")  # other files have come
    assert serving.server("a", ()) is not first
    assert serving.server("b", ()).name == "b"

    assert made == ["begin a", *["end a", "begin a"] * 3, "end a", "begin b"]


def test_what_is_at_work_is_stopped_before_the_executor_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Executor(AbstractContextManager[None]):
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            happened.append("waited")

    def outcomes(*_: object) -> Iterator[tuple[object, ...]]:
        try:
            yield ()
        finally:
            happened.append("stopped")

    monkeypatch.setattr(node, "LocalExecutor", Executor)
    monkeypatch.setattr(node, "outcomes", outcomes)
    monkeypatch.setattr(node, "serving", lambda *_: nullcontext())
    request = node.Request(cases=(), timeout_seconds=None)
    shared = node.Shared(files={}, sources=sources())

    with pytest.raises(ValueError, match="not enough values"):
        node.measure(request.model_dump_json(), shared.model_dump_json())
    assert happened == ["stopped", "waited"]
