"""Launches the CUDA kernels of the folder ``kernels/`` on torch tensors; the only file that imports CuPy.

Torch allocates, CuPy compiles, and CUDA's driver launches. The driver gets bare addresses and torch's current stream;
CuPy's memory pool stays empty. A kernel is compiled at its first use on a device, and CuPy caches the machine code on
disk. What does not change from launch to launch is prepared then, since each launch costs the host's time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from actbench.caches import user_cache
from actbench.errors import KernelError


def folder(name: str, sources: Iterable[Path]) -> Path | None:
    """Return a writable folder in the user's cache for the products of these sources, or None if there is none.

    A cache only saves time, so a read-only home is no error. If the contents of the sources change, so does the folder.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12]
    path = user_cache() / f"{name}-{digest}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


THREADS: Final = 256
"""Threads of a block, as in the kernels' launch bounds."""

SCALARS: Final = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
"""The names that the kernels give the types they are compiled for."""

_BLOCKS_PER_PROCESSOR = 32  # enough to fill a processor several times over; kernels stride over the rest

Macros = Mapping[str, str | int]


def source(stem: str) -> str:
    """Return the source of one op family with each header that it includes inserted once.

    CuPy's cache checks only the text that it gets, not the files that the text includes.
    """
    return _placed(f"{stem}.cu", set())


def _placed(name: str, seen: set[str]) -> str:
    seen.add(name)
    # by these lines the compiler names places in the files, not in what they are put together to
    lines = [f'#line 1 "{name}"']
    text = (resources.files("actbench.kernels") / name).read_text("utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.fullmatch(r'#include "([\w.]+)"', line)
        if header is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        if header[1] not in seen:
            lines.append(_placed(header[1], seen))
        lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines) + "\n"


def options(macros: Macros) -> tuple[str, ...]:
    """Return the compiler's options for a source specialised by macros."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in sorted(macros.items())))


def launch(stem: str, kernel: str, macros: Macros, threads: int, *arguments: Tensor | np.generic) -> None:
    """Start a kernel on the device of its tensors, in torch's current stream there.

    Args:
        stem: Name of the source without its ending.
        kernel: Name of the kernel in it.
        macros: The macros that the source is compiled with, in the same order whenever the kernel is launched.
        threads: How many threads have work; the grid may be smaller, as kernels stride. 0 launches nothing.
        *arguments: The kernel's arguments, in order: contiguous tensors of one CUDA device, the first of all being one,
            and scalars of exactly the parameters' types.

    Raises:
        KernelError: CuPy is missing, finds no usable driver, the source does not compile, or the driver refuses.
    """
    if threads == 0:
        return
    first: Any = arguments[0]
    device = first.get_device()
    # the names of the macros follow from source and kernel
    key = (stem, kernel, device, *macros.values())
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = _prepared(stem, kernel, macros, device, arguments)
    launcher.launch(threads, arguments)


class _Launcher:
    """A compiled kernel on one device, which the driver launches; CuPy's own launch costs several times as much.

    The driver copies the arguments before it returns, so their block of memory is used again. Several threads may
    launch at once, such as those of backward passes: each takes a block off the list, and puts it back.
    """

    def __init__(self, name: str, kernel: Any, device: int, arguments: Sequence[Any]) -> None:
        self._name, self._kernel, self._device = name, kernel, device  # CuPy unloads the kernel with its object
        self._function = ctypes.c_void_p(kernel.ptr)
        self._most_blocks = _most_blocks(device)
        self._tensors = tuple(place for place, argument in enumerate(arguments) if isinstance(argument, Tensor))
        # a slot of 8 bytes for each, in the machine's byte order
        slots = "".join("Q" if isinstance(a, Tensor) else _SLOTS[a.dtype.char] for a in arguments)
        self._pack = struct.Struct(slots).pack_into
        self._count = len(arguments)
        self._free: list[tuple[Any, Any, Any]] = []
        self._driver = _driver()
        self._start = self._driver.cuLaunchKernel

    def launch(self, threads: int, arguments: Sequence[Any]) -> None:
        """Start the kernel with other values of its arguments, in torch's current stream."""
        # torch.cuda.current_device() asks the same behind a look at whether CUDA is initialized
        if _torch._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(threads, arguments)
        values = list(arguments)
        for place in self._tensors:
            values[place] = values[place].data_ptr()
        try:
            block = self._free.pop()
        except IndexError:  # the first launch, or another thread has the last block
            block = self._block()
        memory, places, stream = block
        self._pack(memory, 0, *values)
        stream.value = _torch._cuda_getCurrentRawStream(self._device)
        blocks = min(-(-threads // THREADS), self._most_blocks)
        error = self._start(self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, places, None)
        if error == _NO_CONTEXT:
            self._bind()
            error = self._start(self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, places, None)
        self._free.append(block)
        if error:
            raise KernelError(f"the driver does not launch {self._name} on cuda:{self._device}: CUDA error {error}")
        return None

    def _block(self) -> tuple[Any, Any, Any]:
        """Return memory for the arguments, the addresses of these, and a place for the stream."""
        memory = ctypes.create_string_buffer(8 * self._count)
        start = ctypes.addressof(memory)
        return memory, (ctypes.c_void_p * self._count)(*range(start, start + 8 * self._count, 8)), ctypes.c_void_p()

    def _bind(self) -> None:
        """Make torch's context of the device current in a thread that has called the driver only by this file."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._driver.cuDeviceGet(ctypes.byref(handle), self._device)
        self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        self._driver.cuCtxSetCurrent(context)


_torch: Any = torch._C
_launchers: dict[tuple[Any, ...], _Launcher] = {}  # by source, kernel, device and macros
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SLOTS = {"?": "?7x", "i": "i4x", "I": "I4x", "l": "q", "L": "Q", "q": "q", "Q": "Q", "f": "f4x", "d": "d"}


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _prepared(stem: str, kernel: str, macros: Macros, device: int, arguments: Sequence[Any]) -> _Launcher:
    """Compile a kernel for a device and return what launches it with arguments of these types."""
    cupy, chosen = _cupy(), options(macros)
    try:
        with torch.cuda.device(device):
            function = cupy.RawModule(code=source(stem), options=chosen).get_function(kernel)
            function.compile()
            return _Launcher(kernel, function.kernel, device, arguments)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernels/{stem}.cu does not compile with {' '.join(chosen)}:\n{error}") from error
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise KernelError(
            f"kernels/{stem}.cu: CuPy {cupy.__version__} cannot use cuda:{device} ({error});"
            " install the CuPy of your driver's CUDA version, for CUDA 13: pip install 'actbench[cuda]'"
        ) from error


@functools.cache
def _most_blocks(device: int) -> int:
    return _BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(
            f"CUDA tensors need CuPy, and it cannot be imported ({error}): pip install 'actbench[cuda]'"
        ) from error
    return cupy
