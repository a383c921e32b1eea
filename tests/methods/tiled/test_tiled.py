"""MLPs in pieces have the gradients of whole ones, and what is inside them exists of one piece at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme

WIDTH, POSITIONS = 8, 10


class Gated(nn.Module):
    """The MLP of Llama, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training)
        found: Tensor = self.down(inside)
        return found


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH), Gated(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.mT).mT
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def pair(module: nn.Module, spec: str = "tiled_mlp:4") -> tuple[nn.Module, nn.Module]:
    return module, tiled(copy.deepcopy(module), spec)


def tiled(module: nn.Module, spec: str = "tiled_mlp:4") -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(module)).module


def data(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, POSITIONS)), WIDTH)


def gradients(module: nn.Module, x: Tensor, run: Any = None, *, needs_x: bool = True) -> list[Tensor | None]:
    """Return the gradients of x and of the parameters, by a loss that is no sum."""
    x = x.detach().clone().requires_grad_(needs_x)
    module.zero_grad()
    (run or module)(x).float().square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def assert_alike(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2, POSITIONS), (POSITIONS,), (2, 3, 5), (1, 3), (2, 1)])
def test_gradients_are_those_of_the_whole_mlp(sizes: tuple[int, ...]) -> None:
    plain, changed = pair(Gated())
    x = data(*sizes)

    torch.testing.assert_close(changed(x), plain(x))
    assert_alike(gradients(changed, x), gradients(plain, x))


@pytest.mark.parametrize("frozen", ["", "up", "gate up down"])
@pytest.mark.parametrize("needs_x", [True, False])
def test_frozen_parameters_and_inputs_get_no_gradient(frozen: str, needs_x: bool) -> None:
    plain, changed = pair(Block())
    for module in (plain, changed):
        for name in frozen.split():
            module.mlp.get_submodule(name).requires_grad_(False)  # type: ignore[union-attr]

    x = data()
    found = gradients(changed, x, needs_x=needs_x)

    assert_alike(found, gradients(plain, x, needs_x=needs_x))
    assert (found[0] is None) != needs_x


def test_gradients_of_half_precision_are_summed_in_float32_and_rounded_once() -> None:
    mlp, x = Gated().bfloat16(), data(1, 64).bfloat16()
    changed = tiled(copy.deepcopy(mlp), "tiled_mlp:16")
    expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in mlp.named_parameters()}
    rounded = copy.deepcopy(expected)
    for piece in x.split(4, 1):
        mlp.zero_grad()
        mlp(piece).float().square().sum().backward()
        for name, p in mlp.named_parameters():
            assert p.grad is not None
            expected[name] += p.grad
            rounded[name] = (rounded[name].bfloat16() + p.grad).float()

    gradients(changed, x)

    for name, p in changed.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].bfloat16(), rtol=0, atol=0)
    assert any(not torch.equal(expected[name].bfloat16(), rounded[name].bfloat16()) for name in expected)


@pytest.mark.parametrize("around", ["", "re-entrant", "not re-entrant"])
def test_both_runs_draw_the_same_masks(around: str) -> None:
    """The output is linear in the last weight: their product with the gradient is the loss, if the masks are alike."""
    mlp: Any = tiled(Gated(dropout=0.5))
    x, slope = data().requires_grad_(), data()
    run = (lambda x: checkpoint(mlp, x, use_reentrant=around == "re-entrant")) if around else mlp
    torch.rand(3)

    loss = (run(x) * slope).sum()
    torch.rand(5)
    state = torch.get_rng_state()
    loss.backward()

    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close((mlp.down.weight.grad * mlp.down.weight).sum(), loss.detach())


def test_a_checkpoint_around_runs_no_piece_a_third_time() -> None:
    block: Any = tiled(Block())
    calls: list[int] = []
    block.mlp.down.register_forward_hook(lambda *_: calls.append(1))

    checkpoint(block, data().requires_grad_(), use_reentrant=False).sum().backward()

    assert len(calls) == 2 * 4


def test_the_input_alone_is_saved() -> None:
    mlp, saved, x = tiled(Gated()), list[Tensor](), data().requires_grad_()

    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        mlp(x)

    assert [tensor.untyped_storage().data_ptr() for tensor in saved] == [x.untyped_storage().data_ptr()]


def test_autocast_loses_no_gradient_of_a_weight_that_is_read_once_more() -> None:
    plain, changed = pair(Gated())

    def run(mlp: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(mlp(x), mlp.gate.weight)

    x = data()
    found, expected = gradients(changed, x, lambda x: run(changed, x)), gradients(plain, x, lambda x: run(plain, x))
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_hook_of_a_parameter_sees_one_gradient_of_all_pieces() -> None:
    plain, changed = pair(Gated())
    seen: list[Tensor] = []
    changed.down.weight.register_hook(seen.append)  # type: ignore[union-attr, operator]

    x = data()
    found = gradients(changed, x)

    assert len(seen) == 1
    assert_alike(found, gradients(plain, x))


def test_a_retained_graph_and_second_derivatives() -> None:
    mlp: Any = tiled(Gated())
    loss = mlp(data().requires_grad_()).square().sum()
    loss.backward(retain_graph=True)
    once = mlp.up.weight.grad.clone()
    loss.backward()

    torch.testing.assert_close(mlp.up.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(mlp(data()).square().sum(), mlp.up.weight, create_graph=True)


def test_parameters_that_change_between_the_passes_are_refused() -> None:
    mlp: Any = tiled(Gated())
    loss = mlp(data()).sum()
    with torch.no_grad():
        mlp.up.weight.mul_(2)

    with pytest.raises(ConversionError, match=r"up\.weight .* was changed in place"):
        loss.backward()


def test_tensors_of_a_functional_call_get_the_gradients() -> None:
    plain, changed = pair(Gated())
    given = {name: torch.randn_like(p).requires_grad_() for name, p in plain.named_parameters()}
    x = data()

    found = torch.autograd.grad(torch.func.functional_call(changed, given, x).square().sum(), list(given.values()))

    expected = torch.autograd.grad(torch.func.functional_call(plain, given, x).square().sum(), list(given.values()))
    assert_alike(list(found), list(expected))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", ["ddp", "block", "mlp"])
def test_gradients_under_data_parallelism(how: str) -> None:
    plain, changed = pair(Block())
    run: Any = changed
    if how == "ddp":
        run = DistributedDataParallel(changed)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(changed.mlp if how == "mlp" else changed, mesh=mesh)  # type: ignore[arg-type]

    x = data()
    found = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients(changed, x, run)]

    assert_alike(found, gradients(plain, x))


@pytest.mark.usefixtures("one_process")
def test_layers_that_are_sharded_inside_an_mlp_are_refused() -> None:
    changed: Any = tiled(Block())
    fully_shard(changed.mlp.up, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))

    with pytest.raises(ConversionError, match="FSDP does not go with tiled_mlp"):
        changed(data())


def test_outside_of_training_the_mlp_runs_whole() -> None:
    mlp: Any = tiled(Gated()).eval()
    calls: list[int] = []
    mlp.down.register_forward_hook(lambda *_: calls.append(1))

    mlp(data())

    assert len(calls) == 1


def test_only_names_the_mlps_and_what_is_no_mlp_is_refused() -> None:
    model = nn.Sequential(Block(), Block())

    part = schemes.build("tiled_mlp:2,only=1.mlp").apply(TrainingSetup(model))

    assert [(site.path, site.was, site.becomes) for site in part.sites] == [("1.mlp", "Gated", "in 2 pieces")]
    with pytest.raises(ConversionError, match="in pieces already"):
        actbench.convert(part.module, "tiled_mlp")
    with pytest.raises(NothingToConvertError, match=r"no MLP .* 1 Conv1d"):
        schemes.build("tiled_mlp").apply(TrainingSetup(nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU())))


@pytest.mark.slow
def test_under_a_checkpoint_the_peak_is_lower_by_the_temporaries_of_the_mlp() -> None:
    case = Case(
        model="tiny-llama@intermediate_size=2048",
        batch_size=1,
        sequence_length=512,
        meter="simulated",
        device_profile="cuda-16gib",
        gradient_quality=False,
    )
    plain, changed = (
        measure(case.model_copy(update={"scheme": f"chunked_loss:8+checkpoint{more}"})) for more in ("", "+tiled_mlp:8")
    )

    inside = 512 * 2048 * 4
    assert plain.peak_bytes - changed.peak_bytes > 3 * inside
    assert changed.activation_bytes == plain.activation_bytes


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    "other", ["checkpoint", "selective", "chunked_loss:4", "accumulate:2", "lora:4", "offload", "release"]
)
def test_together_with_other_exact_schemes_the_gradient_is_exact(other: str) -> None:
    check_scheme(f"{other}+tiled_mlp:3", on="tiny-llama", batch_size=2, parts=["forward", "gradient", "saved bytes"])


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("other", ["gact:L1", "actnn:L3", "velora:8", "smaq,on=activations", "msln"])
def test_together_with_schemes_that_pack_gradients_are_finite_and_less_is_saved(other: str) -> None:
    check_scheme(f"{other}+tiled_mlp:3", on="tiny-llama", batch_size=2, parts=["gradient", "saved bytes"])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("gact:L1,only=mlp.down_proj+tiled_mlp", "hooks pack or move"),
        ("tp:2,sequence=true+tiled_mlp", "no MLP that computes each position"),
    ],
)
def test_what_runs_inside_an_mlp_and_does_not_go_with_pieces_is_refused(spec: str, why: str) -> None:
    case = Case(model="tiny-llama", scheme=spec, batch_size=2, sequence_length=16, meter="simulated")

    with pytest.raises(ConversionError, match=why):
        measure(case)
