"""What a norm's gradients lose on average where its input is kept in few bits: `benchmarks/norm_bias.py`."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actbench

ROOT = Path(__file__).parents[2]
DRAWS = 64


@pytest.mark.parametrize(
    ("norm", "shape", "scheme", "bits"),
    [
        pytest.param(nn.LayerNorm(32), (2048, 32), "actnn:L2,bits=1", 1, marks=pytest.mark.slow),
        (nn.LayerNorm(32), (2048, 32), "actnn:L2,bits=2", 2),
        pytest.param(nn.LayerNorm(32), (8192, 32), "actnn:L2,bits=4", 4, marks=pytest.mark.slow),
        (nn.LayerNorm(256), (2048, 256), "actnn:L2,bits=2", 2),
        pytest.param(nn.LayerNorm(768), (1024, 768), "gact:L1.2", 2, marks=pytest.mark.slow),
        (nn.RMSNorm(64), (2048, 64), "gact:L1.2", 2),
        (nn.GroupNorm(2, 8), (1024, 8, 4, 4), "actnn:L2,bits=2", 2),
        pytest.param(nn.GroupNorm(2, 8), (1024, 8, 4, 4), "gact:L1.2", 2, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_the_input_loses_the_variance_of_an_element_over_the_width(
    script: Any, norm: nn.Module, shape: tuple[int, ...], scheme: str, bits: int
) -> None:
    found = script.loss(norm, shape, scheme, bits)

    assert abs(found.measured - found.expected) < 4 * found.error
    assert found.expected > 6 * found.error  # which the test would see missing, and twice as much too
    if bits > 1:  # of so few codes a place between two is not as likely as another
        assert found.closed == pytest.approx(found.expected, rel=0.06)


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.LayerNorm(64), (256, 64)), (nn.GroupNorm(2, 64), (256, 64))], ids=["layer", "group"]
)
def test_gradients_of_weight_and_bias_lose_nothing(script: Any, norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, dy, exact = torch.randn(shape), torch.randn(shape), script.Normed(norm)
    coded = actbench.convert(copy.deepcopy(exact), "actnn:L2,bits=2")

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        for_x = script.gradient(model, x, dy)
        learned = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: grad.double() for name, grad in {**learned, "input": for_x}.items()}

    right, draws = gradients(exact), [gradients(coded) for _ in range(DRAWS)]

    def biased(name: str) -> bool:
        """Return whether the mean of the draws is off by more standard errors, over all elements, than by chance."""
        found = torch.stack([draw[name] for draw in draws])
        far = (found.mean(0) - right[name]) / (found.std(0) / DRAWS**0.5)
        return float(far.square().mean()) > DRAWS / (DRAWS - 2) + 4 * (2 / far.numel()) ** 0.5

    assert not biased("norm.weight")
    assert biased("input")  # the same test sees a bias where there is one
    assert all(torch.equal(draw["norm.bias"], right["norm.bias"]) for draw in draws)


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_the_script_prints(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    title, _, *rows = capsys.readouterr().out.splitlines()
    documented = (ROOT / "docs" / "actnn.md").read_text().partition(title)[2].splitlines()[2 : 2 + len(rows)]

    assert len(documented) == len(rows)
    for row, line in zip(rows, documented, strict=True):
        numbers = [[float(text) for text in re.findall(r"[\d.]+", each)] for each in (row, line)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
