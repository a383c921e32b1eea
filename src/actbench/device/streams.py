"""Streams and events of a simulated card. Work on it is done when its call returns, so nothing ever waits."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch

from actbench.units import counted

CUDA = 1
"""``c10::DeviceType::CUDA``."""

_Stream: Any = torch.Stream  # of C, whose attributes a subclass may well define anew
_Event: Any = torch.Event


def checked(index: int, devices: int | None = None) -> int:
    """Return the number of a card that there is, of so many; None for those that torch knows.

    Raises:
        torch.AcceleratorError: There is none; torch raises the same.
    """
    devices = torch.cuda.device_count() if devices is None else devices
    if index >= devices:
        raise torch.AcceleratorError(
            f"CUDA error: invalid device ordinal {index}: {counted(devices, 'card')} can be seen here, more only by "
            "--gpus N, with a process for each"
        )
    return index


class Selected(threading.local):
    """The card and the streams that a thread has selected."""

    index = 0

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.streams: dict[int, int] = {}

    def checked(self, index: int) -> int:
        """Return the number of a card that there is; an AcceleratorError if there is none, as torch raises it."""
        return checked(index, self.devices)

    def exchange(self, index: int) -> int:
        """Select a card unless ``index`` is negative, and return the one before; -1 if negative."""
        if index < 0:
            return -1
        before, self.index = self.index, self.checked(index)
        return before

    def select(self, index: int) -> None:
        """Select a card, unless ``index`` is negative."""
        self.exchange(index)

    def current(self, index: int | None = None) -> tuple[int, int, int]:
        """Return number, card and type of the selected stream, as torch's C functions do."""
        index = self.index if index is None or index < 0 else self.checked(index)
        return self.streams.get(index, 0), index, CUDA

    def default(self, index: int | None = None) -> tuple[int, int, int]:
        """Return number, card and type of a card's default stream."""
        return 0, self.index if index is None or index < 0 else self.checked(index), CUDA

    def set_stream(self, stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        """Select a stream and its card."""
        self.index = self.checked(device_index)
        self.streams[device_index] = stream_id


class Stream(_Stream):  # type: ignore[misc]
    """Stands in for ``torch.Stream`` and ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_ptr: int | None = None, **known: int) -> Any:
        """Return a new stream on a card, or the one with the number ``stream_id`` on the card ``device_index``."""
        stream = super().__new__(cls, device="cpu")
        number = stream_ptr if stream_ptr is not None else known.get("stream_id")
        stream._number = id(stream) if number is None else number  # a handle is an address with CUDA too
        stream._index = known["device_index"] if "device_index" in known else _index_of(device)
        stream.priority = priority
        stream._before = []
        return stream

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        """The card."""
        return torch.device("cuda", self._index)

    @property
    def device_index(self) -> int:
        """The card's number."""
        return int(self._index)

    @property
    def device_type(self) -> int:
        """As C++ numbers the types."""
        return CUDA

    @property
    def stream_id(self) -> int:
        """The stream's number; 0 is the default stream."""
        return int(self._number)

    @property
    def cuda_stream(self) -> int:
        """The same, as the address of a ``cudaStream_t``."""
        return int(self._number)

    native_handle = cuda_stream

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._number)

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event, or a new one, and return it."""
        event = CudaEvent() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Return that no graph is captured."""
        return False

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return 0, -5

    def __enter__(self) -> Any:
        number, index, _ = torch._C._cuda_getCurrentStream(-1)
        self._before.append((number, index))
        torch._C._cuda_setStream(stream_id=self._number, device_index=self._index, device_type=CUDA)
        return self

    def __exit__(self, *error: object) -> None:
        number, index = self._before.pop()
        torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=CUDA)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self._number, self._index) == (other._number, other._index)

    def __ne__(self, other: object) -> bool:  # torch.Stream has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((self._number, self._index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class ExternalStream(Stream):
    """Stands in for ``torch.cuda.ExternalStream``."""

    def __new__(cls, stream_ptr: int, device: Any = None, **known: int) -> Any:
        """Return the stream at ``stream_ptr``."""
        return super().__new__(cls, device, stream_ptr=stream_ptr, **known)


class Event(_Event):  # type: ignore[misc]
    """Stands in for ``torch.Event`` and ``torch.cuda.Event``; its times are the host's."""

    def __new__(cls, device: Any = None, enable_timing: bool = False, *_: Any, **__: Any) -> Any:
        """Return an event that is not recorded yet; it may ``enable_timing``."""
        event = super().__new__(cls, device="cpu")
        event._index = _index_of(device)
        event._seconds = None
        event._times = enable_timing
        return event

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        """The card."""
        return torch.device("cuda", self._index)

    @property
    def event_id(self) -> int:
        """Its address once it is recorded, else 0."""
        return id(self) if self._seconds is not None else 0

    cuda_event = event_id

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds of the host from this event to the other.

        Raises:
            ValueError: One of them takes no times, or is not recorded; torch raises the same.
        """
        if not (self._times and end_event._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(1e3 * (end_event._seconds - self._seconds))

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.event_id:#x}>" if self.event_id else "<torch.cuda.Event uninitialized>"


class CudaEvent(Event):
    """Stands in for ``torch.cuda.Event``, whose first argument is ``enable_timing``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        """Return an event that is not recorded yet."""
        return super().__new__(cls, None, enable_timing)


def _index_of(device: Any) -> int:
    if isinstance(device, int):
        return checked(device) if device >= 0 else torch.cuda.current_device()
    index = torch.device(device).index if device is not None else None
    return torch.cuda.current_device() if index is None else checked(index)
