"""Operators of torch's tests, real and simulated on a CPU: `benchmarks/cpu_operators.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from actbench.simulator.operators import cpu_operators

TABLE = Path(__file__).parents[2] / "results" / "cpu-operators" / "cpu-operators.json"
STORED: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))


def _is_close(row: dict[str, Any]) -> bool:
    runs = row["runs"]
    return bool(runs) and all(
        abs(run["simulated_bytes"] - run["real_bytes"]) <= 0.02 * run["real_bytes"] for run in runs
    )


CLOSE = sorted(name for name, row in STORED.items() if _is_close(row))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def described(script: Any) -> dict[str, Any]:
    return {op.formatted_name: op for op in script.operators()}


def test_the_table_names_all_operators_and_a_reason_for_each_that_is_off(script: Any) -> None:
    rows = list(script.read(TABLE).values())

    assert len(rows) > 500
    assert [row.operator for row in rows if script.is_off(row) and not script.reason(row)] == []
    assert TABLE.with_suffix(".md").read_text(encoding="utf-8") == script.page(rows)
    made = [row for row in rows if row.runs]
    close = sum(not script.is_off(row) for row in made)
    told = f"Of {len(rows)} operators, {len(made)} were compared, and {close} are within 2 % in every run."
    assert told in (TABLE.parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.mark.sampled(fast=3, slow=40)
@pytest.mark.parametrize("name", CLOSE)
def test_an_operator_takes_what_is_simulated(script: Any, described: dict[str, Any], name: str) -> None:
    row = script.compared(described[name])

    assert row.runs
    assert {run.operands: run.off_by for run in row.runs if abs(run.off_by) > script.TOLERANCE} == {}


def test_what_is_off_is_marked_when_it_runs(script: Any) -> None:
    rows = [row for row in script.read(TABLE).values() if script.is_off(row)]
    large = [(row.operator, run) for row in rows for run in row.runs if run.real_bytes >= script.SMALL_BYTES]
    off = {name for name, run in large if abs(run.off_by) > script.TOLERANCE and not (run.at_most or run.approximate)}

    assert off == set()


MARKED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "a mask": (torch.masked_fill, (torch.ones(64, 64) > 0, torch.ones((), requires_grad=True)), {}),
    "a loss of two layouts": (F.mse_loss, (torch.ones(64, 64).t(),), {}),
    "a target with a gradient": (F.binary_cross_entropy, (torch.ones(64, 64, requires_grad=True),), {}),
    "low images": (
        lambda x, weight, **settings: F.conv2d(x.view(4, 8, 64, 2), weight, **settings),
        (torch.ones(8, 8, 3, 3),),
        {"padding": 1},
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_a_simulation_marks_it(script: Any, name: str) -> None:
    operator, others, settings = MARKED[name]
    x = torch.full((64, 64), 0.5, requires_grad=True)
    found = script.simulated(operator, (x, others, settings), lambda y: y.abs().mean())

    assert found[2], "approximate"


def _of(shape: tuple[int, ...], layout: str) -> Tensor:
    """Return positive numbers, none of which is zero or equal to another."""
    x = torch.randperm(torch.Size(shape).numel()).add(1).div(1000).view(shape)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.requires_grad_()


OPERATORS: dict[str, Callable[[Tensor, int], Any]] = {
    "topk": lambda x, dim: x.topk(3, dim)[0],
    "topk of all": lambda x, dim: x.topk(x.shape[dim], dim),
    "sort": lambda x, dim: x.sort(dim)[0],
    "max": lambda x, dim: x.max(dim)[0],
    "median": lambda x, dim: x.median(dim)[0],
    "mode": lambda x, dim: x.mode(dim)[0],
    "cummax": lambda x, dim: x.cummax(dim)[0],
    "cumprod": lambda x, dim: x.cumprod(dim),
    "prod": lambda x, dim: x.prod(dim),
    "amax": lambda x, dim: x.amax(dim),
    "amin, kept": lambda x, dim: x.amin(dim, keepdim=True),
    "gather": lambda x, dim: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)),
    "index_select": lambda x, dim: x.index_select(dim, torch.tensor([0, 2, 2])),
    "rows by index": lambda x, dim: x.movedim(dim, 0)[torch.tensor([1, 0, 1])],
    "maximum": lambda x, dim: torch.maximum(x, x.flip(dim)),
    "clamp": lambda x, dim: x.clamp(x.detach() * 0.5, x.detach() * 2),
    "roll": lambda x, dim: x.roll((1, 2), (dim, 0)),
    "var_mean": lambda x, dim: torch.var_mean(x, dim),
}
SHAPES = ((24, 64, 96), (384, 512), (8, 16, 32, 40))


@pytest.mark.sampled(fast=24, slow=60)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_derivative_that_selects(script: Any, name: str, shape: tuple[int, ...], dim: int, layout: str) -> None:
    sample = (_of(shape, layout), (dim,), {})
    for loss in script.LOSSES.values():
        script.real(OPERATORS[name], sample, loss)
        true = script.real(OPERATORS[name], sample, loss)

        assert script.simulated(OPERATORS[name], sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


UNFOLDED = {
    "overlapping": {"kernel_size": 3},
    "overlapping, padded": {"kernel_size": 3, "padding": 1},
    "dilated": {"kernel_size": (2, 3), "dilation": 2},
    "apart": {"kernel_size": 4, "stride": 4},
    "fewer elements": {"kernel_size": 2, "stride": 4},
}


@pytest.mark.parametrize("settings", UNFOLDED.values(), ids=UNFOLDED.keys())
@pytest.mark.parametrize("shape", [(8, 16, 32, 32), (16, 48, 48)], ids=str)
def test_unfold(script: Any, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    sample = (_of(shape, "contiguous"), (), settings)
    for loss in script.LOSSES.values():
        script.real(F.unfold, sample, loss)
        true = script.real(F.unfold, sample, loss)

        assert script.simulated(F.unfold, sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


@pytest.mark.parametrize("size", [(34, 34), (32, 36)], ids=str)
def test_fold(script: Any, size: tuple[int, int]) -> None:
    columns = (size[0] - 2) * (size[1] - 2)
    sample = (_of((4, 8 * 9, columns), "contiguous"), (size, 3), {})
    for loss in script.LOSSES.values():
        script.real(F.fold, sample, loss)
        true = script.real(F.fold, sample, loss)

        assert script.simulated(F.fold, sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


RANKED = ((131072,), None), ((282, 470), 0), ((20, 30, 200), 1), ((20, 30, 200), -1)


@pytest.mark.parametrize(("shape", "dim"), RANKED, ids=str)
@pytest.mark.parametrize("interpolation", ["linear", "midpoint", "nearest"])
@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantiles(script: Any, name: str, interpolation: str, shape: tuple[int, ...], dim: int | None) -> None:
    """torch 2.15 selects up to 100 ranks, if they are no more than the root of a row, and sorts for more."""
    for asked in (0.5, torch.tensor([0.1, 0.9]), torch.linspace(0, 1, 101)):
        for keepdim in (False, True):
            sample = (_of(shape, "contiguous"), (asked, dim, keepdim), {"interpolation": interpolation})
            operator, loss = getattr(torch, name), script.LOSSES["mean"]
            script.real(operator, sample, loss)
            true = script.real(operator, sample, loss)

            assert script.simulated(operator, sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


def test_a_quantile_has_the_layout_of_a_real_one() -> None:
    for shape, dim in RANKED:
        for asked in (0.5, torch.tensor(0.5), torch.tensor([0.1, 0.9])):
            for keepdim in (False, True):
                x = torch.rand(shape)
                true = x.quantile(asked, dim, keepdim)
                with cpu_operators(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    found = mode.from_tensor(x).quantile(asked, dim, keepdim)
                    assert (found.shape, found.stride(), found.dtype) == (true.shape, true.stride(), true.dtype)


def test_a_wrong_quantile_is_refused_as_in_torch() -> None:
    with cpu_operators(), FakeTensorMode():
        with pytest.raises(RuntimeError, match=r"between 0 and 1|range"):
            torch.rand(100).quantile(1.5)
        with pytest.raises(IndexError):
            torch.rand(100).quantile(0.5, 3)


TRANSFORMS = ("fft2", "rfft2", "irfft2", "hfft2", "ihfft2", "fftn", "irfftn", "hfftn")


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (-2, -1)], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_over_several_dimensions(script: Any, name: str, dims: tuple[int, ...], layout: str) -> None:
    def operator(x: Tensor) -> Tensor:
        made: Tensor = getattr(torch.fft, name)(x, dim=dims)
        return torch.view_as_real(made) if made.is_complex() else made

    sample = (_of((32, 45, 54), layout), (), {})
    for loss in script.LOSSES.values():
        script.real(operator, sample, loss)
        true = script.real(operator, sample, loss)

        assert script.simulated(operator, sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


SINGLE: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "a volume": (F.conv3d, (1, 32, 16, 16, 16), (32, 32, 3, 3, 3), {"padding": 1}),
    "a pointwise volume": (F.conv3d, (1, 32, 16, 16, 16), (32, 32, 1, 1, 1), {}),
    "a transposed volume": (F.conv_transpose3d, (1, 32, 16, 16, 16), (32, 16, 2, 2, 2), {"stride": 2}),
    "a transposed image": (F.conv_transpose2d, (1, 16, 16, 16), (16, 32, 2, 2), {"stride": 2}),
    "a transposed sequence": (F.conv_transpose1d, (1, 16, 256), (16, 32, 2), {"stride": 2}),
    "an image": (F.conv2d, (1, 16, 16, 16), (32, 16, 3, 3), {"padding": 1}),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_convolution_of_a_single_image(script: Any, name: str) -> None:
    operator, x, weight, settings = SINGLE[name]
    sample = (_of(x, "contiguous"), (_of(weight, "contiguous"),), settings)
    loss = script.LOSSES["mean"]
    script.real(operator, sample, loss)
    true = script.real(operator, sample, loss)

    assert script.simulated(operator, sample, loss)[0] == pytest.approx(true, rel=script.TOLERANCE)


def test_a_product_of_factors_that_are_not_zero_takes_the_short_branch(script: Any) -> None:
    """With zeros torch takes another one, and needs more than is simulated."""
    of_others, of_zeros = _of((64, 64, 64), "contiguous"), torch.zeros(64, 64, 64, requires_grad=True)

    def cumprod(x: Tensor) -> Tensor:
        return x.cumprod(0)

    loss = script.LOSSES["mean"]
    counted = script.simulated(cumprod, (of_zeros, (), {}), loss)[0]
    assert counted == pytest.approx(script.real(cumprod, (of_others, (), {}), loss), rel=script.TOLERANCE)
    assert counted < script.real(cumprod, (of_zeros, (), {}), loss)
