from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actbench.measuring.meters import footprint, temporaries
from actbench.measuring.meters.cpu import AllocationTrace

aten = torch.ops.aten

TOLERANCE = 0.05  # of the true temporaries: oneDNN's own scratch buffers are not modelled


def true_temporaries(run: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak inside an operator over the bytes of its result, and the result."""
    run()  # what libraries keep from their first call is no temporary
    with AllocationTrace() as trace:
        trace.mark("begin")
        result = run()
        trace.mark("end")
    return trace.peak_bytes("begin", "end") - footprint.stored_bytes(footprint.tensors_in(result)), result


CONVOLUTIONS = {
    "3x3": {"x": (8, 64, 28, 28), "weight": (64, 64, 3, 3), "stride": 1, "padding": 1, "groups": 1},
    "3x3 of strides": {"x": (8, 64, 28, 28), "weight": (128, 64, 3, 3), "stride": 2, "padding": 1, "groups": 1},
    "1x1": {"x": (8, 64, 28, 28), "weight": (256, 64, 1, 1), "stride": 1, "padding": 0, "groups": 1},
    "1x1 of strides": {"x": (8, 64, 28, 28), "weight": (128, 64, 1, 1), "stride": 2, "padding": 0, "groups": 1},
    "more weight than image": {"x": (2, 256, 4, 4), "weight": (256, 256, 3, 3), "stride": 1, "padding": 1, "groups": 1},
    "grouped by four": {"x": (8, 128, 28, 28), "weight": (128, 4, 3, 3), "stride": 1, "padding": 1, "groups": 32},
    "grouped by sixteen": {"x": (8, 128, 28, 28), "weight": (128, 16, 3, 3), "stride": 1, "padding": 1, "groups": 8},
    "depthwise 3x3": {"x": (8, 128, 28, 28), "weight": (128, 1, 3, 3), "stride": 1, "padding": 1, "groups": 128},
    "depthwise 7x7": {"x": (8, 128, 28, 28), "weight": (128, 1, 7, 7), "stride": 1, "padding": 3, "groups": 128},
    "one small image": {"x": (1, 128, 4, 4), "weight": (128, 128, 3, 3), "stride": 1, "padding": 1, "groups": 1},
    "lower than the kernel": {"x": (8, 64, 2, 8), "weight": (64, 64, 3, 3), "stride": 1, "padding": 1, "groups": 1},
    "odd channels": {"x": (4, 24, 32, 32), "weight": (10, 24, 3, 3), "stride": 1, "padding": 1, "groups": 1},
}
FIRST_LAYERS = {
    "7x7 of colours": {"x": (8, 3, 112, 112), "weight": (64, 3, 7, 7), "stride": 2, "padding": 3, "groups": 1},
    "patches": {"x": (4, 3, 64, 64), "weight": (128, 3, 16, 16), "stride": 16, "padding": 0, "groups": 1},
}


def operands(x: Any, weight: Any, stride: int, padding: int, groups: int) -> tuple[Any, ...]:
    settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    return torch.randn(x), torch.randn(weight), settings


@pytest.mark.parametrize("sizes", (CONVOLUTIONS | FIRST_LAYERS).values(), ids=(CONVOLUTIONS | FIRST_LAYERS).keys())
def test_a_convolution(sizes: dict[str, Any]) -> None:
    x, weight, settings = operands(**sizes)
    args = (x, weight, None, *settings)

    true, result = true_temporaries(lambda: aten.convolution.default(*args))

    assert temporaries.cpu(aten.convolution.default, args, result) == pytest.approx(true, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [(sizes, [True, True, False]) for sizes in CONVOLUTIONS.values()]
    + [(sizes, [False, True, False]) for sizes in FIRST_LAYERS.values()],
    ids=[*CONVOLUTIONS, *FIRST_LAYERS],
)
def test_the_gradient_of_a_convolution(sizes: dict[str, Any], wanted: list[bool]) -> None:
    x, weight, settings = operands(**sizes)
    grad = torch.randn_like(aten.convolution.default(x, weight, None, *settings))
    args = (grad, x, weight, None, *settings, wanted)

    true, result = true_temporaries(lambda: aten.convolution_backward.default(*args))

    assert temporaries.cpu(aten.convolution_backward.default, args, result) == pytest.approx(true, rel=TOLERANCE)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_batch_norm(layout: torch.memory_format) -> None:
    x = torch.randn(8, 64, 28, 28).to(memory_format=layout)
    channel = torch.ones(64)
    args = (torch.randn_like(x), x, channel, channel, channel, channel, channel, True, 1e-5, [True] * 3)

    true, result = true_temporaries(lambda: aten.native_batch_norm_backward.default(*args))

    assert temporaries.cpu(aten.native_batch_norm_backward.default, args, result) == pytest.approx(true, rel=TOLERANCE)


def test_safe_softmax() -> None:
    args = (torch.randn(8, 16, 256), -1)

    true, result = true_temporaries(lambda: aten._safe_softmax.default(*args))

    assert temporaries.cpu(aten._safe_softmax.default, args, result) == pytest.approx(true, rel=TOLERANCE)


def test_operators_without_temporaries_need_nothing() -> None:
    x = torch.randn(64, 64)
    for operator in (aten.mm.default, aten.add.Tensor):
        true, result = true_temporaries(lambda operator=operator: operator(x, x))

        assert temporaries.cpu(operator, (x, x), result) == true == 0


def test_flash_attention_sums_the_gradient_of_queries_in_float32_tiles() -> None:
    batch, heads, rows, width = 2, 4, 200, 72
    query = torch.empty(batch, heads, rows, width, dtype=torch.bfloat16, device="meta")
    operator = aten._scaled_dot_product_flash_attention_backward.default

    needed = temporaries.cuda(operator, (query, query, query, query), None)

    assert needed == batch * heads * 256 * 96 * 4 + batch * heads * 256 * 4
