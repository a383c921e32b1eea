"""A network that calls its activations as functions is converted like its twin that holds them as layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError
from actbench.measuring import bench, inspection
from actbench.methods.compile.forward import CompiledForward
from actbench.methods.fewbit.called import CalledForward
from actbench.model.records import Case
from actbench.scheme.facets import Packs
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of

Function = Callable[[Tensor], Tensor]

SPECS: dict[str, tuple[Function, Callable[[], nn.Module]]] = {
    "fewbit:3": (F.gelu, nn.GELU),
    "fewbit:2,functions=tanh": (torch.tanh, nn.Tanh),
    "fewbit:1,functions=relu": (torch.relu, nn.ReLU),
    "invact": (F.silu, nn.SiLU),
    "regelu2": (F.gelu, nn.GELU),
    "resilu2": (F.silu, nn.SiLU),
}
SHAPES = [(4, 16, 32), (3, 7, 32), (1, 1, 32)]


class Called(nn.Module):
    """A network whose code calls an activation as a function between linear layers."""

    def __init__(self, function: Function, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.function(layer(x))
        return x


class Held(Called):
    """The same, in which a layer of the network computes the activation."""

    def __init__(self, layer: nn.Module, layers: int = 3) -> None:
        super().__init__(F.relu, layers)
        del self.function
        self.activation = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x


def twins(spec: str) -> tuple[nn.Module, nn.Module]:
    """Return two networks of the same weights, of which one calls its activations and the other holds them."""
    function, layer = SPECS[spec]
    called = nn.Sequential(Called(function), nn.LayerNorm(32), Called(function, 2))
    held = nn.Sequential(Held(layer()), nn.LayerNorm(32), Held(layer(), 2))
    held.load_state_dict(called.state_dict())
    return called, held


def converted(model: nn.Module, spec: str) -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(model)).module


def converted_twins(spec: str) -> tuple[nn.Module, nn.Module]:
    called, held = twins(spec)
    return converted(called, spec), converted(held, spec)


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    (run or model)(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_those_of_layers_to_the_bit(spec: str, shape: tuple[int, ...]) -> None:
    called, held = converted_twins(spec)
    x = torch.randn(shape)

    assert torch.equal(called(x), held(x))
    assert equal(gradients(called, x), gradients(held, x))


@pytest.mark.parametrize("spec", ["fewbit:3", "regelu2", "resilu2"])
def test_gradients_are_not_those_of_the_exact_network(spec: str) -> None:
    called, _ = twins(spec)
    x = torch.randn(SHAPES[0])
    exact = gradients(called, x)

    assert not equal(gradients(converted(called, spec), x), exact)


@pytest.mark.parametrize(
    ("spec", "shape"), [*((spec, SHAPES[0]) for spec in SPECS), *(("fewbit:3", shape) for shape in SHAPES[1:])]
)
def test_what_is_kept_is_what_layers_keep_and_its_closed_form(spec: str, shape: tuple[int, ...]) -> None:
    def kept(setup: TrainingSetup) -> inspection.Trace:
        return inspection.trace(setup, lambda: {"x": torch.randn(shape).requires_grad_()})

    called, held = (
        TrainingSetup(model, loss=lambda model, batch: model(batch["x"]).square().sum()) for model in twins(spec)
    )
    before = kept(called)
    scheme = schemes.build(spec)
    after, layers = scheme.apply(called), scheme.apply(held)
    packs = scheme.facet(Packs)
    assert packs is not None
    packed = 5 * math.ceil(math.prod(shape) * packs.bits / 8)

    trace = kept(after)
    assert trace.total_bytes == kept(layers).total_bytes
    sites, unreached = inspection.inspect(before, trace, after)
    assert [site.path for site in sites] == ["0", "2"]
    assert not unreached
    whole = 0 if spec != "invact" else 5 * 4 * math.prod(shape)  # the output, which nothing else keeps here
    assert sum(site.bytes_after or 0 for site in sites) - _kept_otherwise(before, shape) == packed + whole


def _kept_otherwise(before: inspection.Trace, shape: tuple[int, ...]) -> int:
    """Return what the modules that call keep besides: all that they did, but for the activations' input or output."""
    return sum(before.bytes_at(path) for path in ("0", "2")) - 5 * 4 * math.prod(shape)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_checkpointing_around_modules_that_call(spec: str, use_reentrant: bool) -> None:
    called, _ = converted_twins(spec)
    x = torch.randn(SHAPES[0])

    def run(x: Tensor) -> Tensor:
        for module in called:  # type: ignore[attr-defined]
            x = checkpoint(module, x, use_reentrant=use_reentrant)
        return x

    assert equal(gradients(called, x, run), gradients(called, x))


@pytest.mark.parametrize("spec", SPECS)
def test_with_checkpoint_as_a_scheme(spec: str) -> None:
    called, held = twins(spec)
    x = torch.randn(SHAPES[0])
    both = converted(copy.deepcopy(called), f"{spec}+checkpoint,blocks=Called")

    assert equal(gradients(both, x), gradients(converted(held, spec), x))


def test_with_hooks_that_pack_the_rest() -> None:
    called, held = converted_twins("fewbit:3")
    x = torch.randn(SHAPES[0])

    for model in (called, held):
        schemes.build("offload").apply(TrainingSetup(model))
    assert equal(gradients(called, x), gradients(held, x))


@pytest.mark.parametrize("spec", SPECS)
def test_retained_graphs_accumulation_and_several_calls(spec: str) -> None:
    x = torch.randn(SHAPES[0])
    for model in (found := converted_twins(spec)):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (model(model(x[:, :3])).sum() + model(x[:2]).sum()).backward()
    grads = [[parameter.grad for parameter in model.parameters()] for model in found]

    assert equal(*grads)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS)
def test_undo_takes_the_forwards_off(spec: str) -> None:
    model, _ = twins(spec)
    x, keys = torch.randn(SHAPES[0]), list(model.state_dict())
    before, plain = [dict(vars(part)) for part in model.modules()], gradients(model, x)
    model.zero_grad()

    found = actbench.convert(model, spec)
    assert found is model
    assert list(model.state_dict()) == keys
    conversion = conversion_of(model)
    assert conversion is not None
    assert len(conversion.sites) == 2
    gradients(model, x)
    conversion.undo()

    assert [dict(vars(part)) for part in model.modules()] == before
    assert equal(gradients(model, x), plain)


def test_an_example_tells_which_calls_are_made() -> None:
    class Branches(nn.Module):
        def __init__(self, capped: bool) -> None:
            super().__init__()
            self.linear, self.capped = nn.Linear(8, 8), capped

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x.tanh() if self.capped else x

    model = actbench.convert(nn.Sequential(Branches(True), Branches(False)), "fewbit:3", example_batch=torch.ones(2, 8))
    conversion = conversion_of(model)

    assert conversion is not None
    (site,), (left,) = conversion.sites, conversion.unreached
    assert (site.path, site.was, site.becomes, site.calls) == ("0", "call of Tensor.tanh", "3-bit Tanh", 1)
    assert (left.path, left.kind) == ("1", "call of Tensor.tanh")
    assert "names them" in left.reason
    with pytest.raises(ConversionError, match="does nothing in a training step"):
        actbench.convert(nn.Sequential(Branches(False)), "fewbit:3", example_batch=torch.ones(2, 8))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    called, held = converted_twins("fewbit:3")
    x = torch.randn(SHAPES[0])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(called)
        found = gradients(called, x, parallel)
    finally:
        torch.distributed.destroy_process_group()

    assert equal(found, gradients(held, x))


def mamba() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def language_loss(model: nn.Module) -> Tensor:
    words = torch.randint(0, 99, (2, 8), generator=torch.Generator().manual_seed(1))
    return model.train()(input_ids=words, labels=words).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*slow reference code:UserWarning")
def test_a_folder_of_a_model_that_calls_is_loaded_converted(tmp_path: Path) -> None:
    model = actbench.convert(mamba(), "fewbit:3")
    back = actbench.load_converted(actbench.save_converted(model, tmp_path / "model"))

    assert [type(part).__name__ for part in back.modules() if CalledForward.of(part)] == ["MambaMixer"] * 2
    assert conversion_of(back) == conversion_of(model)
    for one in (model, back):
        language_loss(one).backward()  # type: ignore[no-untyped-call]
    assert equal(*([parameter.grad for parameter in one.parameters()] for one in (model, back)))  # type: ignore[arg-type]


OWN = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.gate, self.narrow = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(F.silu(self.gate(x)) * F.gelu(self.wide(x)).tanh())

def build():
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, lambda n: {"x": torch.randn(n, 32, 64)}, lambda model, batch: model(batch["x"]).square().mean()
"""


@pytest.mark.parametrize(
    "spec",
    [
        *("fewbit:3", "invact"),
        *(
            pytest.param(spec, marks=pytest.mark.slow)
            for spec in ("fewbit:1,functions=silu/tanh", "regelu2", "resilu2")
        ),
    ],
)
def test_meters_agree(spec: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    case = Case(model=f"{tmp_path / 'own.py'}:build", batch_size=16, gradient_quality=False)

    def read(spec: str, **changes: Any) -> Any:
        return bench.Session(case.model_copy(update={"scheme": spec, **changes})).memory()

    measured, simulated = read(spec, meter="cpu"), read(spec, meter="simulated", device_profile="cpu")
    exact = read("exact", meter="cpu")

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.02)
    assert measured.activation_bytes < exact.activation_bytes


COMPILED = [
    *((spec, backend, None) for spec in SPECS for backend in ("aot_eager", "inductor")),
    *((spec, "aot_eager", "0.5") for spec in SPECS),
    ("fewbit:3", "inductor", "0.5"),
]


@pytest.mark.parametrize(
    ("spec", "backend", "budget"),
    [
        pytest.param(*each, marks=() if each == ("fewbit:3", "aot_eager", None) else pytest.mark.sampled(slow=3))
        for each in COMPILED
    ],
)
def test_compiled_networks_have_the_gradients_of_layers_uncompiled(
    spec: str, backend: str, budget: str | None, seeded: None
) -> None:
    torch._dynamo.reset()
    called, held = converted_twins(spec)
    run: Any = called
    if budget is None:
        run = torch.compile(called, backend=backend, fullgraph=True)
    else:
        named = "inductor" if backend == "inductor" else "aot_eager_decomp_partition"
        schemes.build(f"compile:{budget},backend={named}").apply(TrainingSetup(called))
        assert CompiledForward.of(called) is not None
    for _ in range(3):  # other draws through the same graph
        x = torch.randn(SHAPES[0])
        expected = gradients(held, x)
        rounding = 1e-5 * max(float(each.abs().max()) for each in expected)
        for found, same in zip(gradients(called, x, run), expected, strict=True):
            torch.testing.assert_close(found, same, rtol=1e-3, atol=rounding)
    torch._dynamo.reset()


class Leaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.linear(x), 0.3)


def test_arguments_of_a_call_under_compile(seeded: None) -> None:
    torch._dynamo.reset()
    exact, x = nn.Sequential(Leaks(), Leaks()), torch.randn(4, 8)
    model = converted(copy.deepcopy(exact), "fewbit:3")
    expected = gradients(exact, x)  # of one bit, which is exact

    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(gradients(model, x, run), expected)
    assert equal(gradients(model, x), expected)  # makes layers of its own
    assert equal(gradients(model, x, run), expected)
    torch._dynamo.reset()


class Hard(Leaks):
    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(self.linear(x))


def test_calls_that_compilers_hide_are_refused_where_they_have_another_gradient() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    model = converted(nn.Sequential(Hard(), Hard()), "fewbit:3")
    with pytest.raises(ConversionError, match=r"code calls F\.hardswish cannot be compiled: .* layers in place"):
        torch.compile(model, backend="aot_eager")(x)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    left = converted(nn.Sequential(Hard(), nn.GELU()), "fewbit:3,functions=gelu")
    torch.compile(left, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(ConversionError, match=r"F\.hardswish"):
        schemes.build("fewbit:3+compile:1,backend=aot_eager_decomp_partition").apply(
            TrainingSetup(nn.Sequential(Hard()))
        )
    torch._dynamo.reset()


PRESETS = {
    "mamba-130m@num_hidden_layers=2": "call of F.softplus, F.silu",
    "googlenet": "call of F.relu",
    "inception_v3": "call of F.relu",
    "densenet121": "call of F.relu",
    "swin_v2_t": "call of torch.sigmoid",
    "whisper-small": "call of F.gelu",
    "roberta-base@num_hidden_layers=1": "call of torch.tanh",
}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if "roberta" in model else pytest.mark.sampled(slow=2)) for model in PRESETS]
)
def test_presets_that_call_their_activations_keep_less_where_they_do(model: str) -> None:
    length = 8 if "mamba" in model else None
    workload = workloads.load_workload(Case(model=model, batch_size=2, weights="random", sequence_length=length))
    setup = workload.setup(materialize=False, seed=0)

    def batch() -> Batch:
        return workload.batch(2, seed=0)

    before = inspection.trace(setup, batch)
    converted = schemes.build("fewbit:3").apply(setup)
    after = inspection.trace(converted, batch)
    sites, _ = inspection.inspect(before, after, converted)
    calls = [site for site in sites if site.called]

    assert {site.was for site in calls} == {PRESETS[model]}
    assert sum(site.bytes_after or 0 for site in calls) < sum(site.bytes_before or 0 for site in calls)
