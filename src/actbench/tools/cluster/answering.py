"""Whether anything that may be Ray answers at an address: Ray itself would wait for minutes, or for ever."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from actbench.errors import UsageError, first_line

ANSWER_SECONDS: Final = 10.0
"""How long a server may take to answer."""

_CLIENT_PORT: Final = 10001
_SETTINGS: Final = 4
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""How a client of gRPC, which Ray speaks, begins: with frames of HTTP/2, the first of which are settings."""


def check_answers(address: str, variables: Mapping[str, str] = os.environ) -> None:
    """Check that a server of gRPC answers at the address of a cluster.

    Not looked at are ``auto`` without ``RAY_ADDRESS``, addresses that Ray refuses itself, and TLS.

    Raises:
        UsageError: Nothing listens there, or what listens does not answer, or not as Ray does.
    """
    place = variables.get("RAY_ADDRESS", "") if address == "auto" else address
    is_client = place.startswith("ray://")
    if variables.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    try:
        parts = urlsplit(f"//{place.removeprefix('ray://')}")
        host, port = parts.hostname, parts.port or (_CLIENT_PORT if is_client else None)
    except ValueError:  # a port that is not a number
        return
    if not host or port is None:
        return
    what = f"--cluster {address}: no Ray cluster is reached"
    advice = "look at the address, or start one by 'ray start --head'"
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(_GREETING)
            answer = _begun(connection, deadline)
    except TimeoutError:
        silent = f"what listens at {host}:{port} did not answer within {ANSWER_SECONDS:g} s"
        raise UsageError(f"{what} ({silent}); {advice}") from None
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{what} ({first_line(error)}); {advice}") from None
    if answer[3:4] != bytes((_SETTINGS,)):
        raise UsageError(f"{what} (what listens at {host}:{port} speaks no gRPC); {advice}")


def _begun(connection: socket.socket, deadline: float) -> bytes:
    """Return the beginning of the first frame of an answer, or less if the other end closes the connection."""
    answer = b""
    while len(answer) < 4:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(4 - len(answer))
        if not piece:
            break
        answer += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    return answer
