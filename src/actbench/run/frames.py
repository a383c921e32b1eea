"""Messages between a process and the one that started it.

Foreign code may have got hold of the socket, so anything that is no message is recognised at its first byte.
"""

from __future__ import annotations

import socket
import struct
from threading import Lock

TOKEN_BYTES = 16
MOST_BYTES = 256 * 1024**2
"""The longest message; the sites and warnings of a model of 100,000 layers take a tenth of it."""

_HEADER = struct.Struct(f"!{TOKEN_BYTES}sQ")
_CHUNK_BYTES = 1024**2


class GarbledError(Exception):
    """What came over the socket is no message; the argument tells the user what it is."""


class Frames:
    """Messages over a socket, each behind a token and its length.

    The token is ``TOKEN_BYTES`` random bytes that both ends were given, and that nothing else writes.
    """

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.socket = connection
        self._token = token
        self._pending = bytearray()
        self._sending = Lock()

    def send(self, message: bytes, timeout_seconds: float | None = None) -> None:
        """Send a message; others that threads send at the same time come before or after it.

        Raises:
            TimeoutError: The other end did not read it in time.
            OSError: The other end is gone.
        """
        with self._sending:
            self.socket.settimeout(timeout_seconds)
            self.socket.sendall(_HEADER.pack(self._token, len(message)) + message)

    def receive(self) -> bytes:
        """Wait for the next message; an EOFError if the other end closed the socket."""
        self.socket.settimeout(None)
        while (message := self.read()) is None:
            pass
        return message

    def read(self) -> bytes | None:
        """Read what has come, and return the message once it is whole; waits only where nothing has come.

        Raises:
            EOFError: The other end closed the socket.
            GarbledError: It is no message, or one longer than ``MOST_BYTES``.
        """
        chunk = self.socket.recv(min(self._missing_bytes(), _CHUNK_BYTES))
        if not chunk:
            raise EOFError
        self._pending += chunk
        begun = bytes(self._pending[:TOKEN_BYTES])
        if not self._token.startswith(begun):
            raise GarbledError(f"something else than an answer, which begins with {begun!r}")
        if self._missing_bytes():
            return None
        message = bytes(self._pending[_HEADER.size :])
        self._pending.clear()
        return message

    def _missing_bytes(self) -> int:
        if len(self._pending) < _HEADER.size:
            return _HEADER.size - len(self._pending)
        _, length = _HEADER.unpack_from(self._pending)
        if length > MOST_BYTES:
            raise GarbledError(f"an answer of {length} bytes")
        return _HEADER.size + int(length) - len(self._pending)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
