"""8 bits with running ranges: bytes, groups of heads and channels, what is clipped, and ranges that stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, SpecError
from actbench.measuring import inspection
from actbench.methods.mesa import Grouped, RunningRanges
from actbench.model.records import Case
from actbench.packing import SiteState
from actbench.packing.layout import Layout, flat_of
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def groups_of(x: Tensor, count: int, dim: int) -> Tensor:
    """Return a tensor as its groups, (groups, elements of one): parts of a dimension."""
    return torch.stack([part.flatten() for part in x.unflatten(dim, (count, -1)).unbind(dim)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("x", "count", "dim"),
    [
        (torch.randn(3, 7, 48), 16, 2),
        (torch.randn(3, 7, 50), 10, 2),
        (torch.randn(3, 7, 53), 1, 2),
        (torch.randn(2, 12, 5, 9), 12, 1),
        (torch.randn(2, 24, 5, 9), 12, 1),
        (torch.randn(2, 6, 5, 9).to(memory_format=torch.channels_last), 6, 1),
        (torch.randn(2, 5, 6, 9).transpose(1, 2), 6, 1),
        (torch.randn(9, 4, 16).transpose(1, 2), 4, 2),
        (torch.randn(96), 16, 0),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else str(value),
)
def test_each_group_has_a_byte_an_element_between_its_own_bounds(
    x: Tensor, count: int, dim: int, dtype: torch.dtype
) -> None:
    scales = torch.logspace(-3, 3, count).repeat_interleave(x.shape[dim] // count)
    x = (x * scales.view(*(-1 if each == dim else 1 for each in range(x.dim())))).to(dtype)
    site, layout = SiteState("", 8), Layout.of(x)
    codec = RunningRanges(0.9, 16 if count != 12 or x.shape[1] == 12 else 12).at(x, site)
    parts = codec.pack(flat_of(x), layout, site)
    back = codec.unpack(parts, layout)

    assert isinstance(codec, Grouped)
    assert codec.count == count
    assert sum(part.nbytes for part in parts) == x.numel() + 8 * count == codec.packed_bytes(layout)
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), dtype)
    wanted, found = (groups_of(each.double(), count, dim) for each in (x, back))
    steps = (wanted.amax(1) - wanted.amin(1)) / 255
    slack = 2**-7 * wanted.abs() if dtype == torch.bfloat16 else 1e-5 * wanted.abs()
    assert bool(((found - wanted).abs() <= steps[:, None] * 1.001 + slack).all())


def test_without_an_average_the_mean_over_draws_is_the_tensor() -> None:
    x = torch.randn(5, 7, 30)
    site, layout = SiteState("", 8), Layout.of(x)
    codec = RunningRanges(0.0, 16).at(x, site)
    draws = torch.stack([codec.unpack(codec.pack(flat_of(x), layout, site), layout) for _ in range(600)]).double()
    rounded = draws.std(0) > 1e-6  # the bounds of a group are exact in every draw

    errors = ((draws.mean(0) - x)[rounded]) / (draws.std(0)[rounded] / 600**0.5)
    assert float(errors.square().mean()) == pytest.approx(1, abs=0.15)
    assert float(errors.abs().max()) < 6  # of 1,000 elements, some of which round up one time in a hundred
    assert int((~rounded).sum()) < 40


def test_bounds_are_averages_over_steps_and_what_lies_outside_is_clipped() -> None:
    site, layout = SiteState("", 8), Layout(torch.Size((4, 32)), torch.float32)
    codec = RunningRanges(0.9, 2).at(torch.empty(4, 32), site)
    first, second = torch.rand(4, 32), torch.rand(4, 32) * 10
    second[:, 16:] = first[:, 16:]

    codec.pack(first.view(-1), layout, site)
    before = groups_of(first, 2, 1).aminmax(dim=1)
    back = codec.unpack(codec.pack(second.view(-1), layout, site), layout)

    high = before.max[0] + 0.1 * (second[:, :16].max() - before.max[0])
    assert site.kept is not None
    torch.testing.assert_close(site.kept[1, 0], high)
    torch.testing.assert_close(site.kept[:, 1], torch.stack((before.min[1], before.max[1])), rtol=0, atol=0)
    torch.testing.assert_close(back[:, :16][second[:, :16] >= high], high.expand(int((second[:, :16] >= high).sum())))
    torch.testing.assert_close(back, second.where(second < high, high), rtol=0, atol=float(high) / 250)


def test_infinities_stay_whole_and_leave_no_trace_in_the_bounds() -> None:
    site, x = SiteState("", 8), torch.randn(4, 32)
    layout, codec = Layout.of(x), RunningRanges(0.9, 2).at(x, SiteState("", 8))
    codec.pack(x.view(-1), layout, site)
    assert site.kept is not None
    before, infinite = site.kept.clone(), x.clone()
    infinite[0, 3] = torch.inf
    parts = codec.pack(infinite.view(-1), layout, site)

    assert codec.lost(infinite.view(-1), parts) is not None
    assert codec.lost(x.view(-1), parts) is None
    torch.testing.assert_close(site.kept, before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_group_with_what_is_not_finite_decodes_to_nan_where_no_hook_looks(value: float) -> None:
    site, x = SiteState("", 8), torch.randn(4, 32)
    layout, codec = Layout.of(x), RunningRanges(0.9, 2).at(x, SiteState("", 8))
    codec.pack(x.view(-1), layout, site)
    x[0, 3] = value
    back = codec.unpack(codec.pack(x.view(-1), layout, site), layout)

    assert bool(back[:, :16].isnan().all())
    assert float((back - x)[:, 16:].abs().max()) < 0.1


class Attention(nn.Module):
    """Heads of which each is a thousand times larger than the one before."""

    def forward(self, x: Tensor) -> Tensor:
        heads = 2 * x * torch.logspace(0, 6, 3).view(1, 3, 1, 1)
        return torch.matmul(heads, heads.transpose(-2, -1) / 7) / torch.logspace(0, 12, 3).view(1, 3, 1, 1)


@pytest.mark.parametrize(("groups", "is_small"), [(16, True), (1, False)])
def test_products_of_attention_have_a_range_for_each_head(groups: int, is_small: bool) -> None:
    exact, x = nn.Sequential(Doubled(), Attention(), nn.Linear(10, 4)), torch.randn(2, 3, 10, 16)

    (wanted, *_), (found, *_) = (gradients(each, x) for each in (exact, converted(exact, f"mesa,groups={groups}")))
    errors = (found - wanted).transpose(0, 1).flatten(1).norm(dim=1) / wanted.transpose(0, 1).flatten(1).norm(dim=1)

    assert float(errors[2]) < 0.03
    assert bool((errors < 0.03).all()) == is_small


def test_copies_go_on_with_the_ranges_and_a_pass_of_shapes_sets_none() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    model = converted(exact, "mesa")
    setup = TrainingSetup(model, loss=lambda module, x: module(x["x"]).sum())
    small, large = torch.randn(9, 64), 10 * torch.randn(9, 64)

    entries = inspection.itemize(setup, lambda: {"x": torch.randn(9, 64, requires_grad=True)}).entries
    assert {entry.kept_bytes for entry in entries if entry.packed} == {9 * 64 + 8 * 16}
    assert all(site.kept is None for site in model.forward.hooks.all_sites())
    gradients(model, small)
    assert all(site.kept is not None for site in model.forward.hooks.all_sites())
    twin, fresh, resumed = copy.deepcopy(model), converted(exact, "mesa"), converted(exact, "mesa")
    resumed.forward.adapt(model.forward.adapted())
    wanted = gradients(exact, large)

    def error(module: nn.Module) -> float:
        found = gradients(module, large)
        return float(torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)]).norm())

    clipped = error(fresh) * 10
    assert error(twin) > clipped  # it clips to what it saw
    assert error(resumed) > clipped
    assert list(model.state_dict()) == list(exact.state_dict())


@pytest.mark.parametrize("spec", ["mesa:1", "mesa:-0.1", "mesa,groups=0"])
def test_wrong_values_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        schemes.build(spec)


def test_a_model_that_packs_already_is_refused() -> None:
    with pytest.raises(ConversionError, match="packs or moves its saved tensors already"):
        converted(converted(nn.Sequential(nn.Linear(8, 8)), "gact"), "mesa")


@pytest.mark.exhaustive
def test_the_contract_of_schemes_holds() -> None:
    check_scheme("mesa")
    check_scheme("mesa:0.5,groups=4", on="tiny-vit", parts=("gradient", "simulation", "packed bytes"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("tiny-gpt2@resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0", "sdpa"),
        ("tiny-roberta@hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0", "eager"),
        ("resnet-cifar", "sdpa"),
    ],
)
def test_the_mean_gradient_of_a_whole_model_has_next_to_no_bias(model: str, attention: str) -> None:
    more = {} if model == "resnet-cifar" else {"attention": attention, "sequence_length": 32}
    workload = workloads.load_workload(Case(model=model, batch_size=4, **more))  # type: ignore[arg-type]
    batch = workload.batch(4, seed=0)

    def gradient(setup: TrainingSetup) -> Tensor:
        setup.module.zero_grad()
        setup.forward(batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in setup.module.parameters() if p.grad is not None]).double()

    wanted = gradient(workload.setup(materialize=True, seed=0))
    setup = schemes.build("mesa").apply(workload.setup(materialize=True, seed=0))
    draws = [gradient(setup) for _ in range(30)]

    one = float(torch.stack([(draw - wanted).norm() for draw in draws]).mean() / wanted.norm())
    off = float((sum(draws) / 30 - wanted).norm() / wanted.norm())  # type: ignore[union-attr]
    assert 1e-4 < one < 0.03
    assert off < one / 4  # chance leaves 0.18 of it after 30 draws
