"""How kernels are found, compiled and launched, with a stand-in for CuPy where a GPU would be needed."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actbench.errors import KernelError
from actbench.ops import rawkernel


class CompileError(Exception):
    pass


class DriverError(Exception):
    pass


@pytest.fixture
def cupy(monkeypatch):
    """Put a CuPy in place that records, and a CUDA device that torch believes in."""
    made = SimpleNamespace(modules=[], launches=[], streams=[], broken=None)

    def raw_module(*, code, options):
        def compile_() -> None:
            if made.broken is not None:
                raise made.broken
            made.modules.append((code, options))

        def get_function(kernel):
            function = lambda *call: made.launches.append((kernel, *call))  # noqa: E731
            function.compile = compile_
            return function

        return SimpleNamespace(get_function=get_function)

    def from_external(stream):
        made.streams.append(stream.__cuda_stream__())
        return contextlib.nullcontext()

    made.cuda = SimpleNamespace(
        Stream=SimpleNamespace(from_external=from_external),
        compiler=SimpleNamespace(CompileException=CompileError),
        runtime=SimpleNamespace(CUDARuntimeError=DriverError),
    )
    made.RawModule, made.__version__ = raw_module, "14"
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x57))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=2))
    rawkernel._function.cache_clear()
    rawkernel._most_blocks.cache_clear()
    yield made
    rawkernel._function.cache_clear()
    rawkernel._most_blocks.cache_clear()


def launch(threads: int = 1, **macros: str | int) -> torch.Tensor:
    x = torch.ones(3)
    rawkernel.launch("stepwise", "stepwise_encode", macros, threads, x, np.int64(3))
    return x


def test_a_source_is_one_text_without_includes():
    for stem in ("stepwise", "sketch"):
        text = rawkernel.source(stem)

        assert "#include" not in text
        assert text.index("struct Float16") < text.index(f"KERNEL {stem}_")
        assert '#line 1 "common.cuh"' in text
        assert f'#line 1 "{stem}.cu"' in text


def test_tensors_are_passed_as_addresses_in_torchs_stream(cupy):
    x = launch(BITS=3, SCALAR="Float16")

    assert cupy.launches == [("stepwise_encode", (1,), (256,), (np.uint64(x.data_ptr()), np.int64(3)))]
    assert [type(argument) for argument in cupy.launches[0][3]] == [np.uint64, np.int64]
    assert cupy.streams == [(0, 0x57)]
    assert cupy.modules == [(rawkernel.source("stepwise"), ("-std=c++17", "-DBITS=3", "-DSCALAR=Float16"))]


def test_a_kernel_is_compiled_once_for_the_same_options(cupy):
    for bits in (3, 3, 4):
        launch(BITS=bits)

    assert [options for _, options in cupy.modules] == [("-std=c++17", "-DBITS=3"), ("-std=c++17", "-DBITS=4")]
    assert len(cupy.launches) == 3


@pytest.mark.parametrize(("threads", "blocks"), [(256, 1), (257, 2), (2**40, 2 * 32)])
def test_a_grid_covers_the_threads_or_fills_the_device(cupy, threads, blocks):
    launch(threads)

    assert cupy.launches[0][1] == (blocks,)


def test_no_work_starts_nothing(cupy):
    launch(0)

    assert cupy.launches == cupy.modules == []


def test_a_compile_error_shows_the_source_and_the_log(cupy):
    cupy.broken = CompileError("stepwise.cu(12): error: expected a ;")

    with pytest.raises(KernelError, match=r"(?s)kernels/stepwise\.cu.*-DBITS=3.*stepwise\.cu\(12\): error: expected"):
        launch(BITS=3)


def test_a_driver_that_cupy_cannot_use_is_named(cupy):
    cupy.broken = DriverError("cudaErrorInsufficientDriver")

    with pytest.raises(KernelError, match=r"CuPy 14 cannot use .*cudaErrorInsufficientDriver.*actbench\[cuda\]"):
        launch()


def test_without_cupy_it_is_said_how_to_install_it(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(KernelError, match=r"need CuPy.*pip install 'actbench\[cuda\]'"):
        launch()
