"""How the CPU kernels are compiled and threaded.

Numba's own choices do not fit here: its ``workqueue`` layer aborts the process when two threads enter it at once (the
autograd engine, DataParallel), and a pool that was started before a fork is dead after it, and ends the process that
calls it. So nothing is compiled or started at import. The first call starts the ``omp`` layer, and each call takes as
many threads as torch has. A process that is forked after that runs the same blocks on one thread, with the same bits.
So does torch there, whose own pool would wait for ever for threads that are not there.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import extending, types
from numba.core import cgutils
from numba.np.ufunc.parallel import threading_layer

from actbench.ops import rawkernel

BLOCK = 2048
"""Elements of one unit of work: its codes and values stay in the first-level cache. A multiple of 8."""

_carray: Any = vars(numba)["carray"]
_njit: Any = numba.njit  # its types leave options out
_first = threading.RLock()  # Numba's settings are global to the program; a first call changes them for a moment
_config: Any = numba.config  # its attributes are made at run time
_BLOCKS_PER_THREAD = 4  # below this, waking a thread costs more than it saves


def intrinsic(function: Callable[..., Any]) -> Any:
    """Mark a function that emits LLVM instructions and that kernels call."""
    return extending.intrinsic(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that kernels call."""
    return _njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[no-any-return]


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@inlined
def at(address: int, count: int, dtype: Any) -> np.ndarray:
    """Return the array of ``count`` elements at an address; to make it from a tensor before the call takes longer."""
    return _carray(_pointer(address), (count,), dtype)  # type: ignore[no-any-return]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``function`` over blocks (``numba.prange``), compiled at its first call.

    It takes the number of elements, then the other arguments of ``function``, whose first argument is the number of
    blocks. It runs on no more threads than torch and the caller have, and on fewer for little work. It returns what
    ``function`` returns, and None where there are no elements.
    """

    @functools.cache
    def compiled(parallel: bool) -> Callable[..., Any]:
        with _first:
            kept, place = _config.CACHE_DIR, _cache_folder(parallel)
            _config.CACHE_DIR = str(place or "")
            try:  # Numba reads the folder when it wraps a function, so its other users keep theirs
                return numba.njit(function, parallel=parallel, cache=place is not None)  # type: ignore[no-any-return]
            finally:
                _config.CACHE_DIR = kept

    @functools.wraps(function)
    def run(elements: int, *arguments: Any) -> Any:
        blocks = -(-elements // BLOCK)
        if blocks <= _BLOCKS_PER_THREAD:
            return compiled(False)(blocks, *arguments) if blocks else None
        threads = min(torch.get_num_threads(), -(-blocks // _BLOCKS_PER_THREAD))
        # Python has no faster way to notice a fork; for one thread, to start Numba's pool would cost most of the call
        if threads == 1 or _pool() != os.getpid():
            return compiled(False)(blocks, *arguments)
        before = numba.get_num_threads()
        numba.set_num_threads(min(before, threads))
        try:
            return compiled(True)(blocks, *arguments)
        finally:
            numba.set_num_threads(before)

    return run


@functools.cache
def _pool() -> int | None:
    """Start Numba's pool and return the process that has it; None if it is of no use.

    Two callers at once need ``omp`` or ``tbb``.
    """
    with _first:
        before, threads = _config.THREADING_LAYER, torch.get_num_threads()
        _config.THREADING_LAYER = "omp"  # without effect if the program has already started another layer
        try:
            numba.get_num_threads()
            if threading_layer() not in ("omp", "tbb"):  # type: ignore[no-untyped-call]
                return None
            os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
            return os.getpid()
        except ValueError:  # no OpenMP library here: one thread is slower, and safe
            return None
        finally:
            _config.THREADING_LAYER = before
            if torch.get_num_threads() != threads:  # the pool changed torch's number of threads: they share one OpenMP
                torch.set_num_threads(threads)


@functools.cache
def _cache_folder(parallel: bool) -> Path | None:
    """Return the folder for machine code of these sources; Numba's own cache checks one file, not what it calls."""
    root = Path(__file__).parents[2]  # methods have kernels too, in files of these names
    sources = [*Path(__file__).parent.glob("*.py"), *root.rglob("cpu*.py")]
    return rawkernel.folder("parallel" if parallel else "serial", sources)
