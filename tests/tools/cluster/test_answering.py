"""Addresses at which no Ray cluster answers end in one error, before Ray waits there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actbench.errors import UsageError
from actbench.tools.cluster import answering, cluster
from actbench.tools.cluster.answering import check_answers

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Give the address of a server that says one thing to whoever connects, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer or b"")
                connection.recv(100)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "ANSWER_SECONDS", 0.3)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_closed_port_is_refused_by_the_flag_and_the_address(scheme: str) -> None:
    with listening(None) as address:
        pass
    with pytest.raises(UsageError, match=rf"^--cluster {scheme}{address}: no Ray cluster is reached .*refused"):
        check_answers(f"{scheme}{address}")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, r"did not answer within 0\.3 s"),
        (b"HTTP/1.1 400 Bad Request\r\n", "speaks no gRPC"),
        (b"220 mail\r\n", "speaks no gRPC"),
    ],
)
def test_what_listens_and_is_no_ray_is_refused(answer: bytes | None, why: str) -> None:
    with listening(answer) as address, pytest.raises(UsageError, match=why):
        check_answers(f"ray://{address}")


def test_what_speaks_grpc_is_left_to_ray() -> None:
    with listening(SETTINGS) as address:
        check_answers(f"ray://{address}")
        check_answers("auto", {})
    with listening(SETTINGS) as address:
        check_answers("auto", {"RAY_ADDRESS": address})


def test_ray_is_not_asked_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **settings: pytest.fail("Ray is asked"))

    refused = pytest.raises(UsageError, match="--cluster ray://")
    with listening(None) as address, refused, cluster.connected(f"ray://{address}"):
        pass


def test_addresses_that_ray_refuses_itself_are_left_to_it() -> None:
    for address in ("nowhere", "nowhere:port", "ray://", "local"):
        check_answers(address)
