"""Optimizers with less state than Adam: their updates by the papers' formulas, their bytes, and that they train."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench import optim, scheme as schemes, workload as workloads
from actbench.errors import ConversionError, MeasurementError, NothingToConvertError, SpecError
from actbench.measuring import bench
from actbench.measuring.meters import footprint
from actbench.methods.optimizers.adammini import Blocks, blocks_of
from actbench.model.records import Case
from actbench.scheme.setup import Batch, TrainingSetup, TrainStep

SPECS = ("galore:8", "fira:8", "apollo:8", "apollo:1,scaling=tensor,scale=11.3", "adam_mini", "muon8bit")
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 0.1, 0.5


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def loss(module: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = (module(batch["x"]) - batch["y"]).square().mean()
    return result


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def setup(make: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> TrainingSetup:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 64))
    return TrainingSetup(module, loss=loss, make_optimizer=make)


def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(32, 64, generator=random), "y": torch.randn(32, 64, generator=random)}


class Moments:
    """Adam's direction by its formula, in float64."""

    def __init__(self) -> None:
        self.first, self.second, self.steps = torch.zeros(()), torch.zeros(()), 0

    def direction(self, gradient: Tensor, mean: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * mean(gradient**2)
        first, second = self.first / (1 - BETAS[0] ** self.steps), self.second / (1 - BETAS[1] ** self.steps)
        return first / (second**0.5 + EPS)


def limited(update: Tensor, before: list[float]) -> Tensor:
    """Limit the growth of the norm to a hundredth (Fira's algorithm)."""
    norm = float(update.norm())
    if before and norm / before[-1] > 1.01:
        update = update / norm * before[-1] * 1.01
    before.append(float(update.norm()))
    return update


def reference(name: str, gradients: list[Tensor], weight: Tensor) -> Tensor:
    """Return the weight after steps with these gradients; rank 3, a new projection every second step, scale 0.25."""
    moments, norms, projection = Moments(), list[float](), torch.zeros(())
    wide = weight.shape[0] <= weight.shape[1]
    for step, gradient in enumerate(gradients):
        turned = gradient if wide else gradient.t()  # the shorter side first
        if step % 2 == 0:
            if name == "apollo":
                random = torch.Generator().manual_seed(step // 2)
                projection = torch.randn(len(turned), 3, generator=random, dtype=torch.float64) / 3**0.5
            else:
                left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)  # signs are not determined
                projection = (left[:, :3] if wide else right[:3].t()).double()
        low = projection.t() @ turned
        found = moments.direction(low)
        factors = found.norm(dim=0) / low.norm(dim=0)
        if name == "galore":
            update = 0.25 * projection @ found
        elif name == "fira":
            update = 0.25 * (projection @ found + limited((turned - projection @ low) * factors, norms))
        else:
            update = 0.25 * limited(turned * factors, norms)
        weight = weight * (1 - LR * DECAY) - LR * (update if wide else update.t())
    return weight


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
@pytest.mark.parametrize("kind", [optim.GaLore, optim.Fira, optim.Apollo])
def test_updates_of_matrices_are_those_of_the_paper(kind: Any, shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    gradients = [torch.randn(shape, dtype=torch.float64) * scale for scale in (1, 3, 0.2, 1, 5)]
    expected = reference(kind.__name__.lower(), gradients, weight.detach().clone())
    optimizer = kind([weight], [weight], rank=3, gap=2, scale=0.25, lr=LR, weight_decay=DECAY)

    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)  # vectors are found in float32


def test_one_factor_for_a_matrix_is_the_ratio_of_the_norms() -> None:
    weight, gradient = nn.Parameter(torch.zeros(8, 12)), torch.randn(8, 12)
    optimizer = optim.Apollo([weight], [weight], rank=1, scale=1.0, scaling="tensor", lr=1.0)

    weight.grad = gradient.clone()
    optimizer.step()

    low = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).t() @ gradient
    factor = (low / (low.abs() + EPS)).norm() / low.norm()  # Adam's first step is the sign
    torch.testing.assert_close(weight.detach(), -gradient * factor)


def test_the_norm_of_an_update_grows_by_a_hundredth_at_most() -> None:
    weight, norms = nn.Parameter(torch.zeros(8, 12)), []
    optimizer = optim.Apollo([weight], [weight], rank=3, scale=1.0, lr=1.0)
    for size in (1.0, 1.0, 1e4, 1e4, 1e-6, 0.0, 1.0):
        before = weight.detach().clone()
        weight.grad = torch.randn(8, 12) * size
        optimizer.step()
        norms.append(float((weight.detach() - before).norm()))

    assert all(later <= 1.011 * earlier + 1e-5 for earlier, later in itertools.pairwise(norms))
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize(
    ("blocks", "mean"),
    [
        (Blocks((8, 12), 1), lambda x: x.mean(1, keepdim=True)),
        (Blocks((8, 12), 0), lambda x: x.mean(0, keepdim=True)),
        (Blocks((2, 48), 1), lambda x: x.view(2, 48).mean(1).repeat_interleave(4)[:, None]),
        (Blocks((1, 96), 1), lambda x: x.mean()),
    ],
    ids=["outputs", "columns", "heads", "whole"],
)
def test_updates_with_a_moment_for_each_block_are_those_of_the_paper(blocks: Blocks, mean: Any) -> None:
    weight = nn.Parameter(torch.randn(8, 12, dtype=torch.float64))
    expected, moments = weight.detach().clone(), Moments()
    optimizer = optim.AdamMini([weight], {weight: blocks}, lr=LR, weight_decay=DECAY)

    for _ in range(4):
        weight.grad = torch.randn(8, 12, dtype=torch.float64)
        expected = expected * (1 - LR * DECAY) - LR * moments.direction(weight.grad, mean)
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("decoupled", [True, False])
def test_other_parameters_are_stepped_as_torch_does(decoupled: bool) -> None:
    one, other = (nn.Parameter(torch.ones(5)) for _ in range(2))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    exact = kind([one], lr=LR, weight_decay=DECAY)
    found = optim.GaLore([other], [], rank=3, lr=LR, weight_decay=DECAY, decoupled=decoupled)

    for _ in range(4):
        one.grad = torch.randn(5)
        other.grad = one.grad.clone()
        exact.step()
        found.step()

    torch.testing.assert_close(one, other)


def test_muon_s_first_step_is_torch_s_and_later_ones_are_near() -> None:
    one, other = (nn.Parameter(torch.ones(64, 96)) for _ in range(2))
    exact = torch.optim.Muon([one], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    found = optim.Muon8bit([other], [other], lr=LR, weight_decay=DECAY)

    for step in range(6):
        before = one.detach().clone()
        one.grad = torch.randn(64, 96)
        other.grad = one.grad.clone()
        exact.step()
        found.step()
        if step == 0:
            assert torch.equal(one, other)

    assert float((one - other).detach().norm() / (one.detach() - before).norm()) < 0.1
    assert set(found.state[other]) == {"step", "codes", "bounds"}


def test_blocks_are_heads_outputs_rows_and_vectors() -> None:
    llama = workloads.load_workload(Case(model="tiny-llama", batch_size=1)).setup(materialize=True, seed=0).module
    gpt2 = workloads.load_workload(Case(model="tiny-gpt2", batch_size=1)).setup(materialize=True, seed=0).module
    of_llama = {name: blocks_of(llama)[p].count for name, p in llama.named_parameters()}
    config: Any = llama.config

    assert of_llama["model.layers.0.self_attn.q_proj.weight"] == config.num_attention_heads
    assert of_llama["model.layers.0.self_attn.k_proj.weight"] == config.num_key_value_heads
    assert of_llama["model.layers.0.self_attn.v_proj.weight"] == config.num_key_value_heads * config.head_dim
    assert of_llama["model.layers.0.mlp.up_proj.weight"] == config.intermediate_size
    assert of_llama["model.embed_tokens.weight"] == config.vocab_size
    assert of_llama["model.norm.weight"] == 1
    fused: Any = gpt2.get_parameter("transformer.h.0.attn.c_attn.weight")  # (inputs, outputs)
    assert blocks_of(gpt2)[fused].count == fused.shape[1]


HIDDEN = [(128, 64), (32, 128)]
"""The matrices between the first and the last layer, as Muon counts them: all but the head."""


@pytest.mark.parametrize(
    ("spec", "of_hidden"),
    [
        ("galore:8", sum(2 * 8 * max(shape) + 8 * min(shape) for shape in HIDDEN)),
        ("fira:8", sum(2 * 8 * max(shape) + 8 * min(shape) + 1 for shape in HIDDEN)),
        ("apollo:8", sum(2 * 8 * max(shape) + 1 for shape in HIDDEN)),
        ("apollo:1,scaling=tensor", sum(2 * max(shape) + 1 for shape in HIDDEN)),
        ("adam_mini", sum(rows * columns + rows for rows, columns in HIDDEN)),
        ("muon8bit", sum(rows * columns / 4 + rows * columns / 256 for rows, columns in HIDDEN)),
    ],
)
def test_the_state_has_its_bytes(spec: str, of_hidden: float) -> None:
    step = TrainStep(schemes.build(spec).apply(setup()), batch())
    step()
    found = footprint.stored_bytes(footprint.optimizer_state(step.optimizer))

    head, biases = 64 * 32, 128 + 32 + 64
    others = head + 64 + biases + 3 if spec == "adam_mini" else 2 * (head + biases)
    assert found == 4 * (of_hidden + others)


@pytest.mark.parametrize("spec", SPECS)
def test_it_trains(spec: str) -> None:
    step = TrainStep(schemes.build(spec).apply(setup()), batch())

    losses = [float(step()) for _ in range(150)]

    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_goes_on_from_saved_state(spec: str) -> None:
    whole = TrainStep(schemes.build(spec).apply(setup()), batch())
    for _ in range(3):
        whole()
    saved, weights = copy.deepcopy(whole.optimizer.state_dict()), copy.deepcopy(whole.setup.module.state_dict())
    whole()

    resumed = TrainStep(schemes.build(spec).apply(setup()), batch())
    resumed.setup.module.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed()

    for one, other in zip(whole.setup.module.parameters(), resumed.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", ["release+galore:8", "release+adam_mini"])
def test_steps_within_the_backward_pass_give_the_same_weights(spec: str) -> None:
    found, expected = (
        TrainStep(schemes.build(each).apply(setup()), batch()) for each in (spec, spec.removeprefix("release+"))
    )
    for _ in range(3):
        found()
        expected()

    for one, other in zip(found.setup.module.parameters(), expected.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("galore:8", "float32"),
        *(pytest.param(spec, "float32", marks=pytest.mark.slow) for spec in SPECS[1:]),
        *(pytest.param(spec, "bfloat16", marks=pytest.mark.slow) for spec in SPECS),
    ],
)
def test_the_simulation_agrees_with_the_allocator(spec: str, dtype: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    measured = bench.Session(Case(**fields, scheme=spec, dtype=dtype, meter="cpu")).memory()
    simulated = bench.Session(
        Case(**fields, scheme=spec, dtype=dtype, meter="simulated", device_profile="cpu")
    ).memory()

    assert simulated.optimizer_bytes == measured.optimizer_bytes
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02 if dtype == "bfloat16" else 0.005)


def test_another_optimizer_is_refused() -> None:
    changed = schemes.build("galore:8").apply(setup(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)))

    with pytest.raises(ConversionError, match=r"galore: the optimizer is SGD"):
        TrainStep(changed, batch())


def test_a_rank_above_all_matrices_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match="more than 128 rows and columns"):
        schemes.build("galore:128").apply(setup())


def test_two_that_say_how_state_is_kept_are_refused() -> None:
    with pytest.raises(SpecError, match="galore and adam8bit both say how optimizer state is kept"):
        schemes.build("galore+adam8bit")


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises((ConversionError, MeasurementError), match="adam_mini: it looks at whole matrices"):
        bench.Session(Case(model="tiny-llama", batch_size=2, sequence_length=16, scheme="adam_mini+fsdp:2"))
