"""How the launched processes find each other: the first one listens, and says where in torch's store."""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import ValidationError

from actbench.errors import MeasurementError, first_line
from actbench.measuring.rank import Rank
from actbench.model.sources import sources
from actbench.run.frames import TOKEN_BYTES, Frames, GarbledError
from actbench.run.processes import deadline_after, left_until
from actbench.tools.ranks.follower import Hello
from actbench.tools.ranks.launch import Address
from actbench.tools.ranks.team import JOINS, Link, Team

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_MEETING_SECONDS = 600.0
_SAYING_SECONDS = 30.0
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 60, 20, 6


@contextmanager
def leading(place: Rank, address: Address, joins: str = JOINS) -> Iterator[Team]:
    """Wait until all other processes have come, and have them inside the block; they end with it.

    ``joins`` is as of :class:`~actbench.tools.ranks.team.Team`.

    Raises:
        MeasurementError: The store cannot be reached or served, a process does not come, or has other
            versions or files of actbench.
    """
    store = _store(address, is_served_here=not address.is_served)
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1" if address.one_machine else "", 0)))
        token = secrets.token_bytes(TOKEN_BYTES)
        said = {"host": "127.0.0.1" if address.one_machine else address.host, "port": listener.getsockname()[1]}
        store.set(_key(address), json.dumps({**said, "token": token.hex()}))
        links: list[Link] = []
        opened.callback(_close, links)
        _gather(listener, token, place.size, links)
        _check(links)
        yield Team(place, address, sorted(links, key=lambda link: link.hello.rank), joins)
    del store  # served until here


@contextmanager
def following(place: Rank, address: Address) -> Iterator[Frames]:
    """Find the first process, and give the connection to it; a MeasurementError if it cannot be reached."""
    store = _store(address, is_served_here=False)
    try:
        said = json.loads(store.get(_key(address)))
        connection = socket.create_connection((said["host"], said["port"]), timeout=_SAYING_SECONDS)
    except (OSError, RuntimeError) as error:
        raise MeasurementError(f"process {place.rank} cannot reach rank 0: {first_line(error)}") from None
    del store
    with connection:
        _keep_alive(connection)
        frames = Frames(connection, bytes.fromhex(said["token"]))
        hello = Hello(rank=place.rank, local_rank=place.local_rank, host=socket.gethostname(), versions=_versions())
        frames.send(hello.model_dump_json().encode())
        yield frames


def _store(address: Address, *, is_served_here: bool) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    try:
        return TCPStore(
            address.host,
            address.port,
            is_master=is_served_here,
            timeout=timedelta(seconds=_MEETING_SECONDS),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise MeasurementError(
            f"the launched processes cannot meet at {address.host}:{address.port} ({first_line(error)}); MASTER_ADDR "
            "and MASTER_PORT must name the machine of rank 0, and a free port"
        ) from None


def _close(links: list[Link]) -> None:
    for link in links:
        link.close()


def _key(address: Address) -> str:
    return f"actbench/{address.attempt}/first"


def _gather(listener: socket.socket, token: bytes, size: int, links: list[Link]) -> None:
    """Accept the other processes; what connects and is none of them is dropped."""
    deadline = deadline_after(_MEETING_SECONDS)
    while len(links) < size - 1:
        listener.settimeout(left_until(deadline))
        try:
            connection, _ = listener.accept()
        except (TimeoutError, BlockingIOError):  # the latter where no time at all is left
            missing = sorted({*range(1, size)} - {link.hello.rank for link in links})
            raise MeasurementError(
                f"of {size} launched processes, number {', '.join(map(str, missing))} did not connect"
            ) from None
        frames = Frames(connection, token)
        hello = _hello(frames)
        if hello is None:
            connection.close()
        else:
            _keep_alive(connection)
            links.append(Link(frames, hello, size))


def _hello(frames: Frames) -> Hello | None:
    frames.socket.settimeout(_SAYING_SECONDS)
    try:
        while (message := frames.read()) is None:
            pass
        return Hello.model_validate_json(message)
    except (EOFError, OSError, GarbledError, ValidationError):
        return None


def _check(links: list[Link]) -> None:
    """Refuse other versions or files, which measure something else."""
    mine = _versions()
    for link in links:
        if link.hello.versions != mine:
            raise MeasurementError(
                f"process {link.hello.rank}, on {link.hello.host}, has {link.hello.versions}, and rank 0 has "
                f"{mine}: install the same on all machines"
            )


def _versions() -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("actbench", "torch")]
    return f"{', '.join(found)} (actbench's files {sources()[:12]})"


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice where the other machine is gone, although nothing is sent for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE_SECONDS, "TCP_KEEPINTVL": _PROBE_SECONDS, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
