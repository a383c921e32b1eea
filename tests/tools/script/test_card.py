"""A script's belief in a card: what torch and libraries are told, and that nothing of it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cards import Card, product

from actbench.device.card import simulated_device
from actbench.errors import MeasurementError
from actbench.units import GIB

OWNERS = (
    torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx,
    torch.accelerator, torch.version, torch.Tensor, torch.autograd.profiler.profile,
)  # fmt: skip


def attributes() -> list[dict[str, Any]]:
    """Return what each owner has; torch's own caches and what is imported meanwhile count as nothing."""
    return [{name: value for name, value in vars(owner).items() if name != "__warningregistry__"} for owner in OWNERS]


def test_everything_is_restored_after_an_error() -> None:
    before, available = attributes(), torch.cuda.is_available()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def fail() -> None:
        with simulated_device(Card()):
            assert torch.cuda.is_available()
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.float16)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    after = attributes()
    changed = {
        (owner.__name__, name)
        for owner, old, new in zip(OWNERS, before, after, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name) is not new.get(name)
    }
    assert changed == set()
    assert torch.cuda.is_available() == available
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == autocast


def test_the_card_is_the_one_that_is_told(card: Card) -> None:
    told = torch.cuda.get_device_properties("cuda:0")

    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_name() == told.name == "NVIDIA GeForce RTX 4090"
    assert torch.cuda.get_device_capability() == (told.major, told.minor) == (8, 9)
    assert told.total_memory == 24 * GIB
    assert repr(told).startswith("_CudaDeviceProperties(name='NVIDIA GeForce RTX 4090', major=8, minor=9, total_memory")
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.is_bf16_supported(including_emulation=False)
    assert "sm_89" in torch.cuda.get_arch_list()
    assert isinstance(torch.version.cuda, str)
    assert torch.backends.cuda.is_built()
    torch.cuda.set_device("cuda:0")
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(1)
    for ask in (torch.cuda.set_device, torch.cuda.memory_allocated, torch.accelerator.set_device_index):
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal 1"):
            ask(1)


def test_a_card_before_ampere_only_emulates_bfloat16() -> None:
    counters = Card()
    counters.capability = (7, 5)

    with simulated_device(counters):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_several_cards_are_counted_and_selected() -> None:
    counters = Card()
    counters.devices = 4

    with simulated_device(counters):
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2
            assert torch.accelerator.current_device_index() == 2
            assert torch.cuda.current_stream().device == torch.device("cuda", 2)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.device_count() == torch.accelerator.device_count() == len(torch.cuda.get_rng_state_all()) == 4


@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.memory, torch.accelerator])
def test_memory_is_that_of_the_counters(card: Card, module: Any) -> None:
    assert module.memory_allocated() == 3 * GIB
    assert module.max_memory_allocated() == 5 * GIB
    assert module.memory_reserved() == 7 * GIB
    assert module.max_memory_reserved() == 8 * GIB
    assert module.memory_stats()["inactive_split_bytes.all.current"] == 4 * GIB

    module.reset_peak_memory_stats()
    module.empty_cache()

    assert module.max_memory_allocated() == 3 * GIB
    assert module.memory_reserved() == 4 * GIB


def test_free_memory_is_what_nobody_has(card: Card) -> None:
    assert torch.cuda.mem_get_info() == (16 * GIB, 24 * GIB)
    assert torch.accelerator.get_memory_info() == (16 * GIB, 24 * GIB)
    assert torch.cuda.device_memory_used() == 7 * GIB
    assert "7168.000 MB" in torch.cuda.list_gpu_processes()


def test_the_summary_prints_the_numbers(card: Card) -> None:
    summary = torch.cuda.memory_summary()

    assert "| Allocated memory      |   3072 MiB |   5120 MiB |" in summary
    assert "| GPU reserved memory   |   7168 MiB |   8192 MiB |" in summary


def test_names_that_were_imported_before_are_answered_too() -> None:
    from torch.cuda import is_available, max_memory_allocated

    with simulated_device(Card()):
        assert is_available()
        assert max_memory_allocated() == 5 * GIB


def test_streams_are_selected_by_both_forms(card: Card) -> None:
    stream, default = torch.cuda.Stream(), torch.cuda.current_stream()

    assert default == torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream != default
        assert torch.accelerator.current_stream() == stream
    with stream:
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == default
    stream.wait_stream(default)
    stream.wait_event(default.record_event())
    stream.synchronize()
    assert stream.query()
    assert isinstance(stream, torch.Stream)
    torch.ones(2).record_stream(stream)


@pytest.mark.parametrize("kind", ["torch.cuda.Event", "torch.Event"])
def test_events_tell_the_time_between_them(card: Card, kind: str) -> None:
    make = torch.cuda.Event if kind == "torch.cuda.Event" else torch.Event
    start, end = make(enable_timing=True), make(enable_timing=True)

    start.record()
    torch.ones(100, 100) @ torch.ones(100, 100)
    end.record(torch.cuda.current_stream())
    end.synchronize()
    end.wait()

    assert end.query()
    assert 0 < start.elapsed_time(end) < 60_000


def test_events_without_times_tell_none(card: Card) -> None:
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event(enable_timing=True))
    with pytest.raises(ValueError, match="must be recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))


def test_graphs_are_refused_with_the_line(card: Card) -> None:
    assert torch.cuda.CUDAGraph | None  # libraries name it in annotations
    graphs = [getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)]
    for make in (torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.make_graphed_callables, *graphs):
        with pytest.raises(MeasurementError, match=r"torch\.\w+\.\w+ cannot be simulated.*test_card\.py:\d+"):
            make()


def test_what_needs_the_driver_is_refused(card: Card) -> None:
    for ask in (torch.cuda.caching_allocator_alloc, lambda size: torch.cuda.current_blas_handle()):
        with pytest.raises(MeasurementError, match="needs CUDA's driver"):
            ask(8)
    with pytest.raises(MeasurementError, match="MemPool cannot be simulated"):
        torch.cuda.MemPool()


def test_what_is_not_simulated_is_noted_once(capfd: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    with simulated_device(Card(), notes.append):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            product()
        assert any(event.key == "aten::mm" for event in profiler.key_averages())
        assert torch.cuda.utilization() == torch.cuda.utilization() == 100
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5

    assert "Failed to record CUDA event" not in capfd.readouterr().err
    assert [note.partition(":")[0] for note in notes] == [
        "torch.profiler",
        "torch.cuda.utilization",
        "limited to 0.5",
    ]


def test_what_marks_and_waits_does_nothing(card: Card) -> None:
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.init()
    with torch.cuda.nvtx.range("forward"):
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    assert torch.cuda.memory.get_allocator_backend() == "native"
    assert torch.cuda.nccl.version() >= (2,)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
