from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import errors

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.workload import folder


@pytest.fixture(autouse=True)
def _clear_cached_answers() -> None:
    folder.reachable.cache_clear()


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cached", lambda repositories, *, weights: None)


def test_a_server_that_refuses_is_reachable_and_a_closed_port_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def refuse() -> None:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        assert folder.reachable(address)
        thread.join()

    assert not folder.reachable("http://127.0.0.1:9")


def test_a_name_lookup_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(folder, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: released.wait(60) and [])

    start = time.perf_counter()
    answered = folder.reachable("https://hub.invalid")
    waited = time.perf_counter() - start
    released.set()

    assert not answered
    assert waited < 30  # nowhere near the lookup's own time


@pytest.mark.usefixtures("empty_cache")
def test_without_an_answer_auto_takes_random_weights_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: False)
    workload = workloads.load_workload(Case(model="distilbert-base-uncased", batch_size=1, weights="auto"))

    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin == "random"
    assert len(workload.warnings) == 1
    assert "did not answer within 3 s" in workload.warnings[0]
    assert workload.warnings[0].endswith("random weights are used")


@pytest.mark.usefixtures("empty_cache")
def test_pretrained_is_an_error_when_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: False)
    workload = workloads.load_workload(Case(model="gpt2", batch_size=1, weights="pretrained"))

    with pytest.raises(ModelError, match=r"no pretrained weights for gpt2.*--weights random"):
        workload.setup(materialize=True, seed=0)


@pytest.mark.usefixtures("empty_cache")
def test_offline_and_random_never_look_at_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(url: str) -> bool:
        raise AssertionError(f"asked {url}")

    monkeypatch.setattr(folder, "reachable", forbidden)
    workload = workloads.load_workload(Case(model="tiny-bert", batch_size=1, weights="random"))
    workload.setup(materialize=True, seed=0)
    with pytest.raises(ModelError, match="--weights random never asks the hub"):
        workloads.load_workload(Case(model="hf:org/name", batch_size=1, weights="random"))

    monkeypatch.setattr(folder, "offline", lambda: True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        workloads.load_workload(Case(model="hf:org/name", batch_size=1, weights="auto"))


def test_the_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)

    assert folder.cached(("other/name", "org/name"), weights=False) == snapshot
    assert folder.cached(("org/name",), weights=True) is None


def test_a_download_takes_safetensors_only_and_code_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    assert folder.download("org/name", weights=False) == tmp_path
    folder.download("org/name", weights=True)
    folder.download("org/name", weights=False, code=True)

    assert asked[0] == ["config.json"]
    assert all(pattern == "config.json" or "safetensors" in pattern for pattern in asked[1])
    assert asked[2] == ["config.json", "*.py"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError, "the hub has no model 'org/name'"),
        (errors.GatedRepoError, "org/name is gated.*hf auth login"),
        (ConnectionResetError, "could not be downloaded: status 500"),
        (errors.HfHubHTTPError, "could not be downloaded: status 500"),
    ],
)
def test_what_the_hub_answers_becomes_one_message(
    error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*args: object, **options: object) -> str:
        options = {"response": Mock(headers={})} if issubclass(error, errors.HfHubHTTPError) else {}
        raise error("status 500\nand more", **options)

    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    with pytest.raises(ModelError, match=words):
        folder.download("org/name", weights=True)
