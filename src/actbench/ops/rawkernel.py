"""Launches the CUDA kernels of the folder ``kernels/`` on torch tensors; the only file that imports CuPy.

Torch allocates; CuPy compiles and launches. CuPy gets bare addresses and torch's current stream, and its own memory
pool stays empty. A kernel is compiled at its first use on a device, and CuPy caches the machine code on disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
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
        macros: The macros that the source is compiled with.
        threads: How many threads have work; the grid may be smaller, as kernels stride. 0 launches nothing.
        *arguments: The kernel's arguments, in order: contiguous tensors of one CUDA device, and scalars of exactly the
            parameters' types.

    Raises:
        KernelError: CuPy is missing, finds no usable driver, or the source does not compile.
    """
    if threads == 0:
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    passed = tuple(np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
    with torch.cuda.device(device):
        function = _function(stem, kernel, options(macros), device.index)
        blocks = min(-(-threads // THREADS), _most_blocks(device.index))
        with _cupy().cuda.Stream.from_external(_CurrentStream()):
            function((blocks,), (THREADS,), passed)


class _CurrentStream:
    """Torch's current stream with the CUDA stream protocol, which torch's own object has only in newer versions."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, torch.cuda.current_stream().cuda_stream)


@functools.cache
def _function(stem: str, kernel: str, chosen: tuple[str, ...], device: int) -> Any:
    """Return CuPy's function, compiled for the current device, whose index is ``device``."""
    cupy = _cupy()
    try:
        function = cupy.RawModule(code=source(stem), options=chosen).get_function(kernel)
        function.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernels/{stem}.cu does not compile with {' '.join(chosen)}:\n{error}") from error
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise KernelError(
            f"kernels/{stem}.cu: CuPy {cupy.__version__} cannot use cuda:{device} ({error});"
            " install the CuPy of your driver's CUDA version, for CUDA 13: pip install 'actbench[cuda]'"
        ) from error
    return function


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
