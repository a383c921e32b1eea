"""A compiled network of several layers has the gradients of the uncompiled one, or the scheme refuses with the reason.

Where a scheme is random, the mean over draws is held to the exact gradient by its own standard error: a single draw, a
single layer or finite numbers show nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.methods.compile.forward import CompiledForward
from actbench.methods.randomized.ops.sketch import KINDS, Sketching
from actbench.methods.randomized.sketched import Sketched
from actbench.scheme.base import OF_PARTS
from actbench.scheme.setup import TrainingSetup

REFUSE = {
    "actnn": "actnn",
    "backrazor": "backrazor",
    "chunked_loss": "chunked_loss,head=3",
    "compile": "compile:1,backend=aot_eager_decomp_partition",
    "division": "division",
    "dropit": "dropit",
    "encode": "encode:int:6",
    "float8": "float8",
    "gact": "gact",
    "hyclora": "hyclora",
    "mesa": "mesa",
    "msln": "msln",
    "offload": "offload",
    "prac": "prac",
    "tiled_mlp": "tiled_mlp",
    "velora": "velora",
    "wtacrs": "wtacrs",
    "maps": "encode:int:6,on=maps",
    "a part": "gact,only=2",
    "a packed block": "checkpoint,blocks=Block,only=1+gact,only=1",
}
BY_HOOKS = {"coat", "smaq"}
"""What compiles by regions, and is random or rounds as it does uncompiled: tests/packing/hooked/test_compiled.py."""
COMPILE = {
    "checkpoint": "checkpoint,blocks=Block/Linear",
    "fewbit": "fewbit:3",
    "invact": "invact",
    "lora": "lora:4",
    "qlora": "qlora:4",
    "randomized": "randomized:0.5",
    "regelu2": "regelu2",
    "resilu2": "resilu2",
    "selective": "selective,blocks=Block/Linear",
}
TOGETHER = [
    "randomized:0.5+fewbit:3",
    "randomized:0.5+checkpoint,blocks=Block",
    "fewbit:3+checkpoint,blocks=Block",
    "selective:half",
    "selective,blocks=Block,keep=bmm/softmax",
]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"resilu2": nn.SiLU}

DRAWS = 48
MOST_ERRORS = 4.5
"""Standard errors that a mean may be off; of the t distribution of 48 draws, 1 in 20,000 is."""
MOST_UNSEEN = 0.25
"""Relative error of a mean gradient that may escape the test; noise in place of a gradient has one of 1."""

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(
    run: Callable[[Tensor], Tensor], x: Tensor, target: Tensor, parameters: list[Tensor], create_graph: bool = False
) -> list[Tensor]:
    """Return the gradients of the parameters, and of the input where it needs one."""
    sources = [*parameters, x] if x.requires_grad else parameters
    return list(torch.autograd.grad((run(x) - target).square().sum(), sources, create_graph=create_graph))


def check(exact: nn.Module, model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Hold the mean gradient of a converted and compiled model to its own uncompiled one, or to the exact one."""
    random = {name for name, part in model.named_modules() if isinstance(part, Sketched)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    target = -exact(x).detach()
    wanted = dict(zip(dict(exact.named_parameters()), step(exact, x, target, list(exact.parameters())), strict=False))
    like = step(model, x, target, list(trained.values()))
    draws = [step(run, x, target, list(trained.values())) for _ in range(DRAWS if random else 2)]
    rounding = 1e-5 * max(float(each.abs().max()) for each in like)  # some biases have a gradient of 0 but for it
    for name, same, *found in zip([*trained, "input"], like, *draws, strict=False):
        if name.endswith(".weight") and name.removesuffix(".weight") in random:
            truth = wanted[name]
            shares = torch.stack([(each * truth).sum() / truth.square().sum() for each in found])
            error = shares.std() / len(shares) ** 0.5
            assert MOST_ERRORS * error < MOST_UNSEEN, f"{name}: a standard error of {error:.3f} shows nothing"
            assert abs(shares.mean() - 1) < MOST_ERRORS * error, f"{name}: {shares.mean():.3f} +- {error:.3f}"
        else:
            for each in found:
                torch.testing.assert_close(each, same, rtol=1e-3, atol=rounding)


def converted(exact: nn.Module, spec: str) -> nn.Module:
    scheme = schemes.build(spec)
    model = scheme.apply(TrainingSetup(copy.deepcopy(exact))).module
    for parameter in model.parameters() if "parameters" in scheme.changes else ():
        if parameter.requires_grad and not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # a matrix beside one of zeros has a gradient of zeros
    return model


def all_sketches(model: nn.Module) -> nn.Module:
    """Give each sketched layer another sketch, so that one compilation tries all."""
    layers = [part for part in model.modules() if isinstance(part, Sketched)]
    for layer, kind in zip(layers, cycle(KINDS), strict=False):
        layer.sketching = Sketching(kind, 0.5)
    return model


def deep() -> nn.Module:
    """Return a chain of as many linear layers as there are sketches, of both classes in turn."""
    layers = (Conv1D(24, 24) if index % 2 else nn.Linear(24, 24) for index in range(len(KINDS)))
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    for layer in model[::2]:  # what all rows have in common is not to grow from layer to layer: transforms lose by it
        nn.init.orthogonal_(layer.weight, 1.5)
        nn.init.zeros_(layer.bias)
    return model


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize(
    ("backend", "needs_gradient"),
    [
        ("aot_eager", True),
        ("aot_eager", False),
        ("inductor", True),
        ("inductor", False),
    ],
)
def test_the_mean_gradient_of_all_sketches_is_the_exact_one(backend: str, needs_gradient: bool) -> None:
    exact = deep()
    model = all_sketches(converted(exact, "randomized:0.5"))
    x = torch.randn(128, 24).requires_grad_(needs_gradient)

    run = torch.compile(model, backend=backend, fullgraph=True)
    check(exact, model, run, x)
    if backend == "aot_eager":  # operator by operator, as uncompiled
        assert torch.equal(run(x), exact(x))


def check_network(spec: str, backend: str, network: Any, needs_gradient: bool) -> None:
    """Convert and compile a network, hold its gradients, and ask for a second derivative in vain."""
    exact = network.make(ACTIVATIONS.get(spec, nn.GELU))
    try:
        model = converted(exact, spec)
    except ConversionError:
        return  # there is nothing to convert
    x = network.inputs.clone().requires_grad_(needs_gradient)
    run = torch.compile(model, backend=backend)
    check(exact, model, run, x)
    if needs_gradient:
        with pytest.raises(RuntimeError, match=r"create_graph=False|double backward|second derivative"):
            step(run, x, torch.zeros(1), [], create_graph=True)[0].square().sum().backward()


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec == "fewbit:3" else pytest.mark.slow) for spec in COMPILE.values()]
)
def test_a_chain_has_its_gradients_on_aot_eager(spec: str, networks: dict[str, Any]) -> None:
    check_network(spec, "aot_eager", networks["chain"], needs_gradient=True)


@pytest.mark.slow
def test_a_transformer_has_its_gradients_on_aot_eager(networks: dict[str, Any]) -> None:
    check_network("randomized:0.5", "aot_eager", networks["transformer"], needs_gradient=True)


@pytest.mark.slow
def test_a_chain_has_its_gradients_on_inductor(networks: dict[str, Any]) -> None:
    check_network("randomized:0.5,sketch=rows_distinct", "inductor", networks["chain"], needs_gradient=False)


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize(
    ("backend", "network", "needs_gradient"),
    [
        ("aot_eager", "chain", False),  # with a gradient of the input, a test above has it; here a transformer has
        ("aot_eager", "transformer", True),
        ("aot_eager", "convolutions", False),
        ("inductor", "transformer", True),  # its graphs are those above; tests/scheme/test_inductor.py has convolutions
    ],
)
@pytest.mark.parametrize("spec", [*COMPILE.values(), *TOGETHER])
def test_every_network_has_its_gradients(
    spec: str, backend: str, network: str, needs_gradient: bool, networks: dict[str, Any]
) -> None:
    check_network(spec, backend, networks[network], needs_gradient)


@pytest.mark.parametrize(
    ("spec", "network", "budget"),
    [
        ("fewbit:3", "chain", 0.5),
        *(
            pytest.param(spec, network, budget, marks=pytest.mark.sampled(slow=1))
            for spec in COMPILE.values()
            for network, budget in (("chain", 0), ("transformer", 0.5))
        ),
    ],
)
def test_the_gradients_stay_under_a_memory_budget(
    spec: str, network: str, budget: float, networks: dict[str, Any]
) -> None:
    exact, x = networks[network].make(ACTIVATIONS.get(spec, nn.GELU)), networks[network].inputs
    model = converted(exact, spec)
    budgeted = schemes.build(f"compile:{budget},backend=aot_eager_decomp_partition")

    def run(x: Tensor) -> Tensor:
        if CompiledForward.of(model) is None:  # only now: what the compiled model is compared with ran before
            budgeted.apply(TrainingSetup(model))
        found: Tensor = model(x)
        return found

    check(exact, model, run, x)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_ends_where_it_ends_uncompiled(backend: str) -> None:
    """With sketches the losses of two runs differ by chance: those of several uncompiled runs say by how much."""
    x, target = torch.randn(64, 16), torch.randn(64, 8)

    def trained(seed: int, wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> float:
        torch.manual_seed(0)
        exact = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        model = converted(exact, "randomized:0.5")
        run, optimizer = wrap(model), torch.optim.Adam(model.parameters(), 3e-3)
        torch.manual_seed(seed)
        for _ in range(400):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(run(x), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss.item()

    uncompiled = [trained(seed, lambda model: model) for seed in range(4)]
    compiled = trained(5, lambda model: torch.compile(model, backend=backend))

    assert compiled < 2 * max(uncompiled)


def test_every_scheme_is_known_to_compile_or_to_refuse() -> None:
    of_modules = {
        name for name, kind in schemes.find_schemes().items() if {*OF_PARTS, "loss"} & {*kind.model_construct().changes}
    }
    assert of_modules - {"liger"} <= set(COMPILE) | set(REFUSE) | BY_HOOKS  # refused in tests/methods/liger, on a Llama
    assert not set(COMPILE) & set(REFUSE)


@pytest.mark.sampled(fast=8, slow=6)
@pytest.mark.parametrize(
    ("spec", "in_place"),
    [
        *((spec, place % 2 == 0) for place, spec in enumerate(REFUSE.values())),
        *(
            pytest.param(spec, place % 2 == 1, marks=pytest.mark.sampled(slow=8))
            for place, spec in enumerate(REFUSE.values())
        ),
    ],
)
def test_the_others_refuse_with_the_reason(spec: str, in_place: bool, networks: dict[str, Any]) -> None:
    network = networks["transformer"]
    model = converted(network.make(nn.GELU), spec)
    if in_place:
        model.compile(backend="eager")
    run = model if in_place else torch.compile(model, backend="eager")

    with pytest.raises(ConversionError, match=r"cannot be compiled: .*; leave torch.compile out"):
        run(network.inputs)
