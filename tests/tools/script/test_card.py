"""A script's belief in a card: what torch and libraries are told, and that nothing of it stays."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, set_device_states

from actbench.errors import MeasurementError
from actbench.tools.script.card import believed

GIB = 2**30
OWNERS = (
    torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx,
    torch.accelerator, torch.version, torch.Tensor, torch.autograd.profiler.profile,
)  # fmt: skip


class Card:
    """A card with hand-made numbers; each is different."""

    name = "NVIDIA GeForce RTX 4090"
    capability = (8, 9)
    total_bytes = 24 * GIB
    devices = 1

    def __init__(self) -> None:
        self.peak, self.reserved = 5 * GIB, 7 * GIB

    def allocated_bytes(self) -> int:
        return 3 * GIB

    def peak_allocated_bytes(self) -> int:
        return self.peak

    def reserved_bytes(self) -> int:
        return self.reserved

    def peak_reserved_bytes(self) -> int:
        return 8 * GIB

    def reset_peak(self) -> None:
        self.peak = self.allocated_bytes()

    def empty_cache(self) -> None:
        self.reserved = 4 * GIB


@pytest.fixture
def card() -> Any:
    counters = Card()
    with believed(counters):
        yield counters


def attributes() -> list[dict[str, Any]]:
    """Return what each owner has; torch's own caches and what is imported meanwhile count as nothing."""
    return [{name: value for name, value in vars(owner).items() if name != "__warningregistry__"} for owner in OWNERS]


def test_everything_is_restored_after_an_error() -> None:
    before, available = attributes(), torch.cuda.is_available()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def fail() -> None:
        with believed(Card()):
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

    with believed(counters):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_several_cards_are_counted_and_selected() -> None:
    counters = Card()
    counters.devices = 4

    with believed(counters):
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


def test_free_memory_is_what_is_not_reserved(card: Card) -> None:
    assert torch.cuda.mem_get_info() == (17 * GIB, 24 * GIB)
    assert torch.accelerator.get_memory_info() == (17 * GIB, 24 * GIB)
    assert torch.cuda.device_memory_used() == 7 * GIB
    assert "7168.000 MB" in torch.cuda.list_gpu_processes()


def test_the_summary_prints_the_numbers(card: Card) -> None:
    summary = torch.cuda.memory_summary()

    assert "| Allocated memory      |   3072 MiB |   5120 MiB |" in summary
    assert "| GPU reserved memory   |   7168 MiB |   8192 MiB |" in summary


def test_names_that_were_imported_before_are_answered_too() -> None:
    from torch.cuda import is_available, max_memory_allocated

    with believed(Card()):
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


def product() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


def test_autocast_for_cuda_is_on_for_the_tensors_of_the_card(card: Card) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert product().dtype == torch.bfloat16
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert product().dtype == torch.float32
            assert not torch.is_autocast_enabled("cuda")
        with torch.amp.autocast("cuda", dtype=torch.float16):
            assert product().dtype == torch.float16
        assert product().dtype == torch.bfloat16
    assert product().dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")


def test_autocast_has_the_default_type_of_each_device(card: Card) -> None:
    assert torch.amp.is_autocast_available("cuda")
    with torch.autocast("cuda"):
        assert product().dtype == torch.float16
    with torch.autocast("cpu"):
        assert product().dtype == torch.bfloat16
    with pytest.warns(FutureWarning, match="deprecated"):
        older = torch.cuda.amp.autocast()
    with older:
        assert product().dtype == torch.float16


def test_a_function_of_ones_own_gets_autocast_by_its_decorators(card: Card) -> None:
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cuda"), product().dtype))
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = Doubled.apply(x)
    y.sum().backward()

    assert seen == [(True, torch.bfloat16)]


def test_the_scaler_is_enabled_and_steps(card: Card) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cuda")

    assert scaler.is_enabled()
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))  # on the card it is made by its device, which is mapped
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert torch.equal(weight, torch.full((3,), 0.5))


def test_seeds_and_states_are_those_of_cuda(card: Card) -> None:
    torch.manual_seed(5)
    assert torch.cuda.initial_seed() == 5
    if hasattr(torch.accelerator, "random"):  # torch 2.11 lacks it
        assert torch.accelerator.random.initial_seed() == 5
    torch.cuda.manual_seed_all(6)

    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    torch.cuda.set_rng_state(state)

    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    assert torch.cuda.initial_seed() == 6
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(8)
    assert torch.cuda.initial_seed() == 6
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.zeros(5056, dtype=torch.uint8))


def test_a_generator_of_the_card_draws_and_returns_to_its_state(card: Card) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    torch.randn(5, generator=generator)
    state = generator.get_state()

    drawn = torch.randn(5, generator=generator)
    generator.set_state(state)

    assert generator.device == torch.device("cuda", 0)
    assert torch.equal(torch.randn(5, generator=generator), drawn)
    assert torch.equal(torch.randn(5, generator=generator.set_state(state).clone_state()), drawn)
    assert copy.deepcopy(generator).device == torch.device("cuda", 0)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device == torch.device("cpu")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(card: Card, reentrant: bool) -> None:
    drawn = []

    def block(x: Tensor) -> Tensor:
        drawn.append(torch.nn.functional.dropout(torch.ones(50), 0.5))
        return x * drawn[-1]

    x = torch.ones(50, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=True)
    y.sum().backward()

    assert len(drawn) == 2
    assert torch.equal(*drawn)


def test_a_checkpoint_keeps_and_sets_the_state_of_the_card_while_tensors_are_fake(card: Card) -> None:
    torch.cuda.manual_seed(6)
    with FakeTensorMode() as mode:
        state = torch.cuda.get_rng_state(0)
        torch.cuda.manual_seed(7)
        set_device_states([0], [state], device_type="cuda")
        assert torch.cuda.initial_seed() == 6
        torch.cuda.set_rng_state(mode.from_tensor(state))

    assert type(state) is Tensor
    assert torch.cuda.initial_seed() == 6


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
    with believed(Card(), notes.append):
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
        "torch.cuda.set_per_process_memory_fraction",
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


def run(code: str, before: str = "") -> None:
    """Run code inside the block, in a process of its own: libraries keep for ever what they once asked."""
    script = (
        "import importlib.util\nimport torch\n"
        f"spec = importlib.util.spec_from_file_location('of_the_card', {__file__!r})\n"
        "tests = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(tests)\n"
        f"{textwrap.dedent(before)}\nwith tests.believed(tests.Card()):\n"
        + textwrap.indent(textwrap.dedent(code), "    ")
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_build_without_cuda_believes_too() -> None:
    run(
        """
        assert torch.cuda.is_available() and torch.accelerator.device_count() == 1
        assert torch.backends.cuda.is_built() and torch.version.cuda
        assert torch.cuda.max_memory_allocated() == 5 * 2**30 and torch.cuda.mem_get_info()[0] == 17 * 2**30
        assert torch.cuda.get_arch_list() == ["sm_89"] and torch.cuda.nccl.version()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0), torch.cuda.nvtx.range("forward"):
            torch.cuda.synchronize()
        torch.manual_seed(3)
        """,
        before="""
        for name in [name for name in vars(torch._C) if name.startswith(("_cuda_", "_nccl", "_nvtx"))]:
            delattr(torch._C, name)
        torch._C._has_cuda, torch.version.cuda, torch.cuda._cudart = False, None, None
        torch._C._accelerator_getAccelerator = lambda: None
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        """,
    )


def test_accelerate_believes() -> None:
    run("""
        from accelerate import Accelerator, PartialState, utils
        from accelerate.state import AcceleratorState
        from torch.overrides import TorchFunctionMode

        class Mapped(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "device"})

        for mixed, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            accelerator = Accelerator(mixed_precision=mixed)
            assert accelerator.device.type == "cuda" and (accelerator.scaler is not None) == (mixed == "fp16")
            with accelerator.autocast():
                assert tests.product().dtype == dtype
            AcceleratorState._reset_state(True)
        assert utils.is_cuda_available() and utils.is_bf16_available() and PartialState().device.type == "cuda"
        with Mapped():
            assert utils.get_max_memory()[0] == 17 * 2**30
        utils.memory.clear_device_cache(garbage_collection=True)
        assert torch.cuda.memory_reserved() == 4 * 2**30
    """)


@pytest.mark.slow
def test_transformers_peft_and_trl_believe() -> None:
    run("""
        import peft, trl
        from peft.utils.other import infer_device
        from transformers import TrainingArguments
        from transformers.utils import is_torch_bf16_gpu_available, is_torch_cuda_available

        assert is_torch_cuda_available() and is_torch_bf16_gpu_available() and infer_device() == "cuda"
        for mixed in ("bf16", "fp16"):
            arguments = TrainingArguments(output_dir="unused", report_to=[], **{mixed: True})
            assert arguments.device == torch.device("cuda", 0) and arguments.n_gpu == 1
        assert trl.SFTConfig(output_dir="unused", report_to=[]).bf16
    """)


@pytest.mark.slow
def test_lightning_picks_the_card() -> None:
    run("""
        from lightning import Fabric, Trainer
        from lightning.fabric.accelerators.cuda import num_cuda_devices
        from lightning.pytorch.accelerators import CUDAAccelerator

        assert num_cuda_devices() == 1 and CUDAAccelerator.is_available()
        asked = Trainer(accelerator="gpu", devices=1, precision="16-mixed", logger=False, enable_checkpointing=False)
        found = Trainer(logger=False, enable_checkpointing=False)
        for trainer in (asked, found):
            assert trainer.strategy.root_device == torch.device("cuda", 0)
        assert asked.precision_plugin.scaler.is_enabled() and isinstance(found.accelerator, CUDAAccelerator)
        assert Fabric(accelerator="cuda", devices=1).device.type == "cuda"
    """)


@pytest.mark.slow
def test_libraries_of_models_import() -> None:
    run("""
        import bitsandbytes, diffusers, timm, torchmetrics, torchvision
        from diffusers import UNet2DConditionModel
        from diffusers.training_utils import EMAModel, free_memory

        free_memory()
        timm.utils.NativeScaler()
        assert torchmetrics.MeanMetric().device == torch.device("cpu")
    """)


def test_libraries_forget_what_they_were_told_before_and_inside() -> None:
    """Transformers asks once whether there is a card, and remembers the answer."""
    from transformers.utils.import_utils import is_torch_cuda_available

    before = is_torch_cuda_available()
    with believed(Card()):
        inside = is_torch_cuda_available()

    assert (before, inside, is_torch_cuda_available()) == (False, True, False)
