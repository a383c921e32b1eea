"""Answer the questions that torch's C++ asks of CUDA, for a card that is not there.

torch's dispatch, autocast, engine and compiler run on fake ``cuda`` tensors but for what they ask of
``at::CUDAHooksInterface``: whether a device has a context, how many devices there are, which cuDNN is installed.
Without a driver the answers end a backward pass. Inside :func:`answered` the object's table of virtual functions is
replaced by a copy in which these functions are Python's. Nothing is compiled, and torch's files stay as they are.

The place of each function in the table follows from the order of declarations in the headers of the installed torch
(Itanium C++ ABI, section 2.5: functions of the base class first, each in order of declaration, a destructor twice). It
is checked by the table's size before the table is used, and by a small backward pass after that.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.device.engine import backward_possible, count_devices, shared_library
from actbench.device.fallback import fallbacks_on_host
from actbench.device.patches import attribute
from actbench.errors import MeasurementError

_WORD = ctypes.sizeof(ctypes.c_size_t)
_FIRST = 2
"""Words of a table before its first function: the offset to the object's top, and the object's type."""

_CUDNN_VERSION = 92000
"""cuDNN 9.20: torch asks for nothing that a later one has."""

_Signature = Callable[..., Any]
_BOOL = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_BOOL_OF_DEVICE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)
_BOOL_OF_ADDRESS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_INT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_LONG = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)
_DOUBLE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)
_ADDRESS = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_entered = threading.Lock()


def answers(cards: int) -> dict[str, tuple[_Signature, Any]]:
    """Return what each replaced function is: its signature, whose first argument is the object, and its answer."""
    allocator = shared_library("libc10")["_ZN3c1015GetCPUAllocatorEv"]
    allocator.restype = ctypes.c_void_p
    return {
        "isBuilt": (_BOOL, True),
        "isAvailable": (_BOOL, True),
        "hasCUDA": (_BOOL, True),
        "init": (_NOTHING, None),
        "deviceCount": (_DEVICE, cards),
        "getNumGPUs": (_INT, cards),
        "current_device": (_DEVICE, 0),
        "getCurrentDevice": (_DEVICE, 0),
        # torch then switches to no device when a backward pass ends
        "hasPrimaryContext": (_BOOL_OF_DEVICE, False),
        # host memory that is pinned is host memory
        "getPinnedMemoryAllocator": (_ADDRESS, allocator()),
        "isPinnedPtr": (_BOOL_OF_ADDRESS, False),
        # batch norm and convolutions choose cuDNN's form, whose backward pass keeps other tensors
        "hasCuDNN": (_BOOL, True),
        "compiledWithCuDNN": (_BOOL, True),
        "versionCuDNN": (_LONG, _CUDNN_VERSION),
        "versionRuntimeCuDNN": (_LONG, _CUDNN_VERSION),
        "batchnormMinEpsilonCuDNN": (_DOUBLE, 1e-5),
        "supportsDilatedConvolutionWithCuDNN": (_BOOL, True),
        "supportsDepthwiseConvolutionWithCuDNN": (_BOOL, True),
        "supportsBFloat16ConvolutionWithCuDNNv8": (_BOOL, True),
        "supportsBFloat16RNNWithCuDNN": (_BOOL, True),
    }


@contextmanager
def answered(cards: int = 1) -> Iterator[None]:
    """Inside the block, let torch's C++ find CUDA cards; its Python still asks ``torch._C`` for the driver.

    Raises:
        MeasurementError: The system is Windows; or a block is open already; or the installed torch is not as its
            headers say.
    """
    if sys.platform == "win32":
        raise MeasurementError(
            "a card cannot be simulated on Windows, whose C++ lays out virtual functions in another way: use WSL"
        )
    if not _entered.acquire(blocking=False):
        raise MeasurementError("a simulated card is in use in this process already; one process has one")
    try:
        # before the hooks are there: the engine would count the card, too, and start a thread for it
        count_devices()
        shown = torch._C._show_config()  # which asks cuDNN for its version where there is a card
        with (
            attribute(torch._C, "_show_config", lambda: shown),
            attribute(FakeTensorMode, "avoid_device_init", True),  # torch asks it before it calls the driver
            attribute(fake_tensor, "init_gpu_context", _make_no_context),
            fallbacks_on_host(),
            _CudaHooks(answers(cards)).replaced(),
            backward_possible(),
        ):
            yield
    finally:
        _entered.release()


def _make_no_context(device: torch.device) -> None:
    """Stand in for what torch calls before the first fake tensor on a device, and what asks the driver."""


class _CudaHooks:
    """torch's one object of type ``CUDAHooksInterface``, and a copy of its table with other answers."""

    def __init__(self, given: dict[str, tuple[_Signature, Any]]) -> None:
        get = shared_library("libtorch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
        get.restype = ctypes.c_void_p
        self._pointer = ctypes.c_size_t.from_address(get())  # to the first function of the table
        places = places_of_functions()
        words = len(places) + _FIRST
        found = table_bytes()
        if found not in (None, words * _WORD):
            raise MeasurementError(
                f"a card cannot be simulated with torch {torch.__version__}: its table of CUDA hooks has {found} "
                f"bytes, and its headers declare {words * _WORD}; install another version of torch"
            )
        self._table = (ctypes.c_size_t * words).from_buffer_copy(
            (ctypes.c_size_t * words).from_address(self._pointer.value - _FIRST * _WORD)
        )
        # kept, as the table has nothing but their addresses
        self._functions = {name: signature(_always(answer)) for name, (signature, answer) in given.items()}
        for name, function in self._functions.items():
            self._table[_FIRST + places[name]] = ctypes.cast(function, ctypes.c_void_p).value or 0

    @contextmanager
    def replaced(self) -> Iterator[None]:
        before = self._pointer.value
        self._pointer.value = ctypes.addressof(self._table) + _FIRST * _WORD
        try:
            yield
        finally:
            self._pointer.value = before


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


@functools.cache
def places_of_functions() -> dict[str, int]:
    """Return the place of each virtual function in the table, read from the headers of the installed torch."""
    names = list[str]()
    for base in ("AcceleratorHooksInterface", "CUDAHooksInterface"):
        header = Path(torch.__file__).parent / "include" / "ATen" / "detail" / f"{base}.h"
        try:
            text = header.read_text()
        except OSError as error:
            raise MeasurementError(
                f"a card cannot be simulated: {header} cannot be read ({error.strerror}); install torch from its wheel"
            ) from None
        body = text[text.index(f"struct TORCH_API {base}") :].partition("\n};")[0]
        # wheels for CUDA and for the CPU are built without what stands there for ROCm
        body = re.sub(r"#ifdef USE_ROCM.*?#endif|//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)
        for name in re.findall(r"\bvirtual\b[^;{=(]*?(~?\w+)\s*\(", body):
            names += [f"{name} (complete)", f"{name} (deleting)"] if name.startswith("~") else [name]
    return {name: place for place, name in enumerate(names)}


class _Location(ctypes.Structure):
    """``Dl_info`` of dlfcn.h: where an address is, and the symbol that is there."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _ElfSymbol(ctypes.Structure):
    """``Elf64_Sym`` of elf.h."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


_WITH_SYMBOL = 1
"""``RTLD_DL_SYMENT`` of dlfcn.h."""


def table_bytes() -> int | None:
    """Return the size of the table in the installed torch, with its two words in front; None on macOS.

    It is that of the base class, whose symbol is exported. The table of a build with CUDA has the same functions.
    """
    if sys.platform == "darwin":  # Mach-O keeps no sizes
        return None
    symbol = ctypes.c_char.in_dll(shared_library("libtorch_cpu"), "_ZTVN2at18CUDAHooksInterfaceE")
    location, entry = _Location(), ctypes.POINTER(_ElfSymbol)()
    ctypes.CDLL(None).dladdr1(
        ctypes.byref(symbol), ctypes.byref(location), ctypes.byref(entry), ctypes.c_int(_WITH_SYMBOL)
    )
    return entry.contents.size if entry else 0
