"""How kernels are found, compiled and launched, with a stand-in for CuPy where a GPU would be needed."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
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


class Driver:
    """CUDA's driver: notes launches with the values of their arguments, and fails where it is told to."""

    TYPES = (ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float)

    def __init__(self) -> None:
        self.launches, self.calls, self.errors = [], [], []

    def cuLaunchKernel(self, function, *sizes_and_places):
        *sizes, shared, stream, places, extra = sizes_and_places
        values = [kind.from_address(place).value for kind, place in zip(self.TYPES, places, strict=False)]
        assert (shared, extra) == (0, None)
        self.launches.append((function.value, tuple(sizes), stream.value, values))
        return self.errors.pop(0) if self.errors else 0

    def cuDeviceGet(self, handle, device):
        self.calls.append(("device", device))

    def cuDevicePrimaryCtxRetain(self, context, handle):
        self.calls.append(("retain",))

    def cuCtxSetCurrent(self, context):
        self.calls.append(("current",))


@pytest.fixture
def cupy(monkeypatch):
    """Put a CuPy and a driver in place that record, and a CUDA device that torch believes in."""
    made = SimpleNamespace(modules=[], devices=[], driver=Driver(), broken=None, function=0x1234, stream=0x57)

    def raw_module(*, code, options):
        def compile_() -> None:
            if made.broken is not None:
                raise made.broken
            made.modules.append((code, options))

        return SimpleNamespace(
            get_function=lambda kernel: SimpleNamespace(compile=compile_, kernel=SimpleNamespace(ptr=made.function))
        )

    @contextlib.contextmanager
    def on(device):
        made.devices.append(device)
        before, torch_stub._cuda_getDevice = torch_stub._cuda_getDevice, lambda: device
        yield
        torch_stub._cuda_getDevice = before

    made.cuda = SimpleNamespace(
        compiler=SimpleNamespace(CompileException=CompileError),
        runtime=SimpleNamespace(CUDARuntimeError=DriverError),
    )
    made.RawModule, made.__version__ = raw_module, "14"
    monkeypatch.setitem(sys.modules, "cupy", made)
    torch_stub = SimpleNamespace(_cuda_getDevice=lambda: CPU, _cuda_getCurrentRawStream=lambda device: made.stream)
    made.torch = torch_stub
    monkeypatch.setattr(rawkernel, "_torch", torch_stub)
    monkeypatch.setattr(rawkernel, "_driver", lambda: made.driver)
    monkeypatch.setattr(rawkernel, "_launchers", {})
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=2))
    rawkernel._most_blocks.cache_clear()
    yield made
    rawkernel._most_blocks.cache_clear()


CPU = torch.empty(0).get_device()
"""The index of the device of the tensors here, which stand for tensors of a CUDA device."""


def launch(threads: int = 1, number: int = 3, **macros: str | int) -> torch.Tensor:
    x = torch.ones(3)
    scalars = np.int64(number), np.uint32(7), np.float32(0.5)
    rawkernel.launch("stepwise", "stepwise_encode", macros, threads, x, *scalars)
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

    sizes = 1, 1, 1, 256, 1, 1
    assert cupy.driver.launches == [(0x1234, sizes, 0x57, [x.data_ptr(), 3, 7, 0.5])]
    assert cupy.modules == [(rawkernel.source("stepwise"), ("-std=c++17", "-DBITS=3", "-DSCALAR=Float16"))]


def test_a_later_launch_passes_its_own_arguments(cupy):
    launch(number=3)
    x = launch(number=-(2**40))

    assert cupy.driver.launches[1][3] == [x.data_ptr(), -(2**40), 7, 0.5]


def test_a_launch_on_another_device_than_the_current_one_makes_it_current(cupy):
    launch()
    cupy.devices.clear()
    cupy.torch._cuda_getDevice = lambda: CPU + 1
    launch()

    assert cupy.devices == [CPU]
    assert len(cupy.driver.launches) == 2


def test_a_thread_without_a_context_gets_torchs(cupy):
    cupy.driver.errors = [201]
    launch()

    assert cupy.driver.calls == [("device", CPU), ("retain",), ("current",)]
    assert cupy.driver.launches[0] == cupy.driver.launches[1]


def test_an_error_of_the_driver_is_told(cupy):
    cupy.driver.errors = [700]

    with pytest.raises(KernelError, match=r"stepwise_encode.*CUDA error 700"):
        launch()


def test_threads_that_launch_at_once_do_not_share_the_memory_of_arguments(cupy):
    seen = []
    note = cupy.driver.cuLaunchKernel

    def launching_inside(*call):
        if not seen:
            seen.append(call)
            launch(number=4)
        return note(*call)

    cupy.driver.cuLaunchKernel = launching_inside
    launch(number=5)

    assert [values[1] for *_, values in cupy.driver.launches] == [4, 5]


def test_a_kernel_is_compiled_once_for_the_same_options(cupy):
    for bits in (3, 3, 4):
        launch(BITS=bits)

    assert [options for _, options in cupy.modules] == [("-std=c++17", "-DBITS=3"), ("-std=c++17", "-DBITS=4")]
    assert len(cupy.driver.launches) == 3


@pytest.mark.parametrize(("threads", "blocks"), [(256, 1), (257, 2), (2**40, 2 * 32)])
def test_a_grid_covers_the_threads_or_fills_the_device(cupy, threads, blocks):
    launch(threads)

    assert cupy.driver.launches[0][1][0] == blocks


def test_no_work_starts_nothing(cupy):
    launch(0)

    assert cupy.driver.launches == cupy.modules == []


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


DRIVER = """
#include <cstdint>
#include <cstring>
struct Call { uint64_t function; uint32_t sizes[6]; uint32_t shared; uint64_t stream, extra, values[4]; } call;
extern "C" Call* last() { return &call; }
extern "C" int cuLaunchKernel(void* function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                              unsigned shared, void* stream, void** places, void** extra) {
    call = {(uint64_t)function, {a, b, c, d, e, f}, shared, (uint64_t)stream, (uint64_t)extra, {}};
    for (int i = 0; i < 4; i++) memcpy(&call.values[i], places[i], i < 2 ? 8 : 4);
    return 0;
}
"""


class Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("sizes", ctypes.c_uint32 * 6),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("extra", ctypes.c_uint64),
        ("values", ctypes.c_uint64 * 4),
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile a driver with")
def test_a_driver_written_in_c_gets_every_argument_whole(cupy, monkeypatch, tmp_path):
    """Handles and addresses have 64 bits, and C takes them by the declaration in CUDA's header."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", "-o", tmp_path / "driver.so", tmp_path / "driver.cpp"]
    subprocess.run(command, check=True)
    cupy.driver = ctypes.CDLL(str(tmp_path / "driver.so"))
    cupy.driver.last.restype = ctypes.POINTER(Call)
    cupy.function, cupy.stream = 0x7F12_3456_789A_BCDE, 0xFEDC_BA98_7654_3210
    x = launch(10**6, number=-(2**40), BITS=3)

    found = cupy.driver.last().contents
    assert (found.function, found.stream, found.shared, found.extra) == (cupy.function, cupy.stream, 0, 0)
    assert list(found.sizes) == [64, 1, 1, 256, 1, 1]
    half = np.float32(0.5).view(np.uint32)
    assert list(found.values) == [x.data_ptr(), 2**64 - 2**40, 7, half]
