"""``torch.compile`` on a simulated card: Inductor's generated code allocates, reuses and frees."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes
from actbench.simulator import inductor
from actbench.tools.script.libraries import compiled
from actbench.tools.script.simulation import Simulation
from actbench.units import MIB

pytestmark = pytest.mark.skipif(not compiled.is_possible(), reason="compiles with torch 2.15 or newer, and Triton")

CARD = "h100-80gb"
WORKSPACE = 32 * MIB
"""What cuBLAS needs on an H100 while it computes a product."""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what is compiled here apart from the user's, and from what other tests compiled."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, tokens: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def as_it_is(model: nn.Module) -> Any:
    return model


def returned(model: nn.Module) -> Any:
    return torch.compile(model)


def in_place(model: nn.Module) -> Any:
    model.compile()
    return model


def train_gpt(
    way: Callable[[nn.Module], Any], batch: int, tokens: int, width: int, words: int, **options: Any
) -> Simulation:
    with actbench.simulate(CARD, **options) as card:
        model = GPT(width, tokens, words).cuda()
        run = way(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="cuda")
        while True:
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return card


def train(loss: Callable[[], Tensor], weight: Tensor) -> Simulation:
    """Run steps of ``loss`` in a simulation that is open."""
    optimizer = torch.optim.SGD([weight], 0.1)
    while True:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_gpt_holds_what_inductor_allocates() -> None:
    """The logits exist once: the backward pass overwrites them."""
    size = {"batch": 8, "tokens": 1024, "width": 768, "words": 50304}
    eager, one, again = (train_gpt(way, **size) for way in (as_it_is, returned, returned))
    assert round(eager.peak_bytes / MIB, 1) == 6341.3
    assert round((one.peak_bytes - WORKSPACE) / MIB, 1) == 2487.9
    assert again.peak_bytes == one.peak_bytes


@pytest.mark.parametrize("way", [returned, in_place])
def test_a_compiled_model_holds_less_and_keeps_its_names(way: Callable[[nn.Module], Any]) -> None:
    size = {"batch": 4, "tokens": 256, "width": 128, "words": 8192}
    eager, found = train_gpt(as_it_is, **size), train_gpt(way, **size)
    assert found.peak_bytes - WORKSPACE < 0.6 * (eager.peak_bytes - WORKSPACE)
    assert found.measurement.weights_bytes == eager.measurement.weights_bytes
    assert any(f"Compiled with torch {torch.__version__}" in note for note in found.measurement.warnings)
    assert not any("Compiled" in note for note in eager.measurement.warnings)
    assert "blocks.\\*.up" in found.table()


def test_a_scheme_compiles_what_a_script_trains() -> None:
    size = {"batch": 4, "tokens": 256, "width": 128, "words": 8192}
    by_script = train_gpt(returned, **size).measurement
    by_scheme = train_gpt(as_it_is, **size, scheme=schemes.build("compile:1")).measurement
    assert by_scheme.peak_bytes == by_script.peak_bytes
    assert [site.was for site in by_scheme.sites] == ["GPT"]
    assert any("Compiled with torch" in note for note in by_scheme.warnings)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_kernel_of_the_scripts_own_is_launched_by_compiled_code() -> None:
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def twice(  # type: ignore[no-untyped-def]
        read, written,
        block: tl.constexpr,
    ):  # fmt: skip
        places = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(written + places, 2 * tl.load(read + places))

    @torch.compile
    def run(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        twice[(x.numel() // 128,)](x, made, 128)
        return made + 1

    numbers = MIB // 4
    with actbench.simulate(CARD) as card, torch.no_grad():
        x = torch.zeros(numbers, device="cuda")
        run(x)
        torch.cuda.reset_peak_memory_stats()
        assert run(x).shape == x.shape
        assert torch.cuda.max_memory_allocated() == 3 * MIB  # Inductor writes over nothing that such a kernel made
    assert not any("eagerly" in note for note in card.notes)


def test_a_fused_chain_of_operators_holds_its_input_and_its_output() -> None:
    numbers = 4 * MIB // 4

    def chain(x: Tensor) -> Tensor:
        return (x.sin() + torch.full((numbers,), 2.0, device=x.device)).cos().tanh()

    peaks = {}
    with actbench.simulate(CARD):
        x = torch.zeros(numbers, device="cuda")
        for name, run in {"eager": chain, "compiled": torch.compile(chain)}.items():
            with torch.no_grad():
                run(x)  # what is compiled is cached, and holds nothing
                torch.cuda.reset_peak_memory_stats()
                run(x)
            peaks[name] = torch.cuda.max_memory_allocated() // MIB
    assert peaks == {"eager": 16, "compiled": 8}


def test_a_fused_loss_saves_its_input_alone() -> None:
    numbers = 4 * MIB // 4
    saved = {}
    with actbench.simulate(CARD):
        weight = torch.ones(numbers, device="cuda", requires_grad=True)

        def loss() -> Tensor:
            return (weight.sin().exp() * weight.tanh()).sum()

        for name, run in {"eager": loss, "compiled": torch.compile(loss)}.items():
            run()
            before = torch.cuda.memory_allocated()
            value = run()
            saved[name] = (torch.cuda.memory_allocated() - before) // MIB
            del value
    assert saved == {"eager": 8, "compiled": 0}


def test_odd_sizes_of_products_are_padded_for_tensor_cores_alone() -> None:
    """A result of 1003 columns is computed with 1008, which are then cut."""
    peaks = {}
    with actbench.simulate(CARD):
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = (torch.zeros(size, dtype=dtype, device="cuda") for size in ((1024, 1024), (1024, 1003)))
            run = torch.compile(lambda x, weight: torch.mm(x, weight))
            with torch.no_grad():
                run(x, weight)
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run(x, weight)
            peaks[dtype] = torch.cuda.max_memory_allocated() - held - WORKSPACE
            torch.compiler.reset()
    rounded = 1024 * 1003 * 4  # a multiple of 512
    assert peaks[torch.float32] == rounded
    assert peaks[torch.bfloat16] == 2 * 1024 * 1008 * 2


def test_compiled_flex_attention_holds_no_scores() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with actbench.simulate(CARD) as card:
        weight = torch.zeros(1, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        attend: Any = torch.compile(flex_attention)
        train(lambda: attend(weight, weight, weight).float().mean(), weight)
    assert card.peak_bytes < 8 * 2048 * 2048 * 2  # one matrix of scores for each head


def test_where_a_function_cannot_be_traced_its_parts_are_compiled() -> None:
    seen = []
    with actbench.simulate(CARD) as card:
        weight = torch.ones(512, 512, device="cuda", requires_grad=True)

        @torch.compile
        def loss() -> Tensor:
            y = (weight @ weight).sin()
            seen.append(y.sum().item())
            return (weight @ y).cos().mean()

        train(loss, weight)
    assert seen == [1.0] * len(seen)
    assert len(seen) >= 2
    assert any("Compiled with" in note for note in card.measurement.warnings)


def test_a_model_of_eight_processes_is_compiled() -> None:
    with actbench.simulate(CARD, processes=8) as card:
        torch.distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(Block(64).cuda())
        run, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), 0.1)
        while True:
            run(torch.zeros(2, 32, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any("Compiled with" in note for note in card.measurement.warnings)


class Scaled(nn.Module):
    """Multiplies by a weight, and by a constant that it makes on the card."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * x.new_tensor(0.5) * len(x)).sum()


def test_a_model_of_eight_processes_takes_views_and_makes_constants() -> None:
    """A batch that is evaluated whole is trained on in parts, which are views of it."""
    with actbench.simulate(CARD, processes=8) as card:
        torch.distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(torch.compile(Scaled().cuda()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = torch.zeros(4, 64, device="cuda")
        with torch.no_grad():
            model(batch)
        while True:
            for part in batch.split(4):
                model(part).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any("Compiled with" in note for note in card.measurement.warnings)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton tells this once, where it first compiles one
def test_a_compiled_product_in_eight_bits_is_written_into_its_buffer() -> None:
    """It has no form for fake tensors that writes: without one, zeros of all its sizes were made in host memory."""
    with actbench.simulate(CARD), torch.no_grad():
        x = torch.zeros(1024, 1024, device="cuda", dtype=torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")

        @torch.compile
        def product() -> Tensor:
            return torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16).sin()

        product()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert product().shape == (1024, 1024)
        assert torch.cuda.max_memory_allocated() - held == 1024 * 1024 * 2 + MIB  # and cuBLASLt's workspace


@pytest.mark.parametrize("is_in_place", [True, False])
def test_another_backend_runs_eagerly_and_is_named(is_in_place: bool) -> None:
    with actbench.simulate(CARD) as card:
        model = nn.Linear(8, 8).cuda()
        if is_in_place:
            model.compile(backend="aot_eager")
        run = model if is_in_place else torch.compile(model, backend="aot_eager")
        train(lambda: run(torch.zeros(8, 8, device="cuda")).sum(), model.weight)
    (note,) = [each for each in card.measurement.warnings if "torch.compile" in each]
    assert note.startswith("torch.compile(backend='aot_eager') runs eagerly")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "reduce-overhead"}, ["torch.compile(mode='reduce-overhead') is compiled here without CUDA graphs"]),
        (
            {"mode": "max-autotune"},
            [
                "torch.compile(mode='max-autotune') is compiled here without measuring kernels",
                "torch.compile(mode='max-autotune') is compiled here without CUDA graphs",
            ],
        ),
        (
            {"options": {"triton.cudagraphs": True}},
            ["torch.compile with triton.cudagraphs is compiled here without CUDA graphs"],
        ),
    ],
)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_needs_a_card_to_compile_is_left_out_and_named(
    options: dict[str, Any], named: list[str], is_in_place: bool
) -> None:
    with actbench.simulate(CARD) as card:
        model = nn.Linear(8, 8).cuda()
        if is_in_place:
            model.compile(**options)
        run = model if is_in_place else torch.compile(model, **options)
        train(lambda: run(torch.zeros(8, 8, device="cuda")).sum(), model.weight)
    notes = card.measurement.warnings
    assert [each.partition(":")[0] for each in notes if "is compiled here" in each] == named
    assert any("Compiled with" in note for note in notes)


def test_tuning_that_a_script_switches_on_for_all_is_left_out_too() -> None:
    with torch._inductor.config.patch(max_autotune=True), actbench.simulate(CARD) as card:
        model = torch.compile(nn.Linear(512, 512).cuda())
        train(lambda: model(torch.zeros(512, 512, device="cuda")).sum(), next(model.parameters()))
    assert any("compile with max_autotune is compiled here without measuring" in x for x in card.measurement.warnings)


def test_a_backward_pass_may_be_compiled_too() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True), actbench.simulate(CARD) as card:
        weight = torch.ones(512, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)

        @torch.compile
        def passes() -> None:
            (weight.sin() * weight.cos()).sum().backward()

        while True:
            passes()
            assert weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
    assert any("Compiled with" in note for note in card.measurement.warnings)


def test_a_compiled_step_of_an_optimizer_is_refused() -> None:
    def step() -> None:
        with actbench.simulate(CARD):
            weight = torch.ones(8, device="cuda", requires_grad=True)
            optimizer = torch.optim.AdamW([weight])
            weight.sum().backward()
            torch.compile(lambda: optimizer.step())()

    with pytest.raises(Exception, match="compile of an optimizer's step is not simulated"):
        step()


def test_torch_that_is_told_not_to_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not compiled.is_possible()
    with actbench.simulate(CARD) as card:
        model = torch.compile(nn.Linear(8, 8).cuda())
        train(lambda: model(torch.zeros(8, 8, device="cuda")).sum(), model.weight)
    assert any(note.startswith("torch.compile runs eagerly") for note in card.measurement.warnings)


def test_a_simulated_cpu_runs_eagerly() -> None:
    with actbench.simulate("cpu") as card:
        model = torch.compile(nn.Linear(8, 8))
        train(lambda: model(torch.zeros(8, 8)).sum(), model.weight)
    assert any(note.startswith("torch.compile runs eagerly") for note in card.measurement.warnings)


def test_a_thread_runs_compiled_code() -> None:
    with actbench.simulate(CARD) as card:
        weight = torch.ones(512, device="cuda", requires_grad=True)
        run = torch.compile(lambda: (weight.sin() * weight.cos()).sum())
        thread = threading.Thread(target=train, args=(run, weight))
        thread.start()
        thread.join()
    assert any("Compiled with" in note for note in card.measurement.warnings)


def test_torch_compiles_for_the_real_machine_before_and_afterwards(cache: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() + 1

    before, own = torch.compile(function, backend="eager"), torch.compile
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    x = torch.ones(3)
    assert torch.equal(before(x), function(x))
    with actbench.simulate(CARD):
        torch.compile(lambda x: x.sin() * 2)(torch.ones(3, device="cuda"))
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == cache / "actbench" / "inductor-simulated"
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder
    assert torch.compile is own
    assert torch.equal(before(x), function(x))
    assert torch.equal(torch.compile(function, backend="aot_eager")(x), function(x))


INTERNALS = {
    "ConvertFrame": ("__call__",),
    "torch._C._dynamo.guards": ("_empty_strided_cuda", "_reinterpret_tensor"),
    "AsyncCompile": ("triton", "cpp_pybinding", "warm_pool"),
    "torch._inductor.config": ("compile_threads",),
    "DriverConfig": ("_active", "_default"),
    "ConstantFolder": ("run",),
    "torch.fx.experimental.proxy_tensor": ("unset_fake_temporarily",),
    "torch._inductor.fx_passes.pad_mm": ("_should_pad", "get_cached_should_pad"),
    "OptimizerVariable": ("graph_break_if_pending_mutation",),
}


def test_each_internal_of_torch_that_is_replaced_is_there() -> None:
    """It is looked up where torch itself looks, with the arguments that torch gives it."""
    found: dict[str, tuple[str, ...]] = {}
    for owner, name, value in inductor.Inductor((9, 0))._replacements():
        kind = getattr(owner, "__name__", type(owner).__name__)
        found[kind] = (*found.get(kind, ()), name)
        own = getattr(owner, name)
        if inspect.isfunction(own) and inspect.isfunction(value) and name in ("triton", "get_cached_should_pad"):
            assert len(inspect.signature(own).parameters) == len(inspect.signature(value).parameters)
    assert found == INTERNALS
    assert hasattr(torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals")
