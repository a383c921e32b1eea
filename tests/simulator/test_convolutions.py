"""Temporaries of transposed convolutions, and of tensors that torch copies before it convolves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actbench.measuring.meters import footprint
from actbench.measuring.meters.cpumeter import AllocationTrace
from actbench.simulator import temporaries

aten = torch.ops.aten

TOLERANCE = 0.05  # of the true temporaries: oneDNN's own scratch buffers are not modelled

KERNELS = {
    "3x3": ((8, 64, 28, 28), (64, 64, 3, 3), 1, 1, 1),
    "3x3 of strides": ((8, 128, 14, 14), (128, 64, 3, 3), 2, 1, 1),
    "1x1 of strides": ((8, 128, 14, 14), (128, 64, 1, 1), 2, 0, 1),
    "to colours": ((8, 64, 28, 28), (64, 3, 3, 3), 1, 1, 1),
    "odd channels": ((8, 10, 28, 28), (10, 24, 3, 3), 1, 1, 1),
    "grouped, of strides": ((8, 64, 14, 14), (64, 16, 3, 3), 2, 1, 4),
    "one small image": ((1, 64, 8, 8), (64, 32, 3, 3), 1, 1, 1),
}


def measured(run: Callable[[], Any]) -> tuple[int, Any]:
    run()
    with AllocationTrace() as trace:
        trace.mark("begin")
        result = run()
        trace.mark("end")
    return trace.peak_bytes("begin", "end") - footprint.stored_bytes(footprint.tensors_in(result)), result


def settings(stride: int, padding: int, groups: int) -> tuple[Any, ...]:
    return [stride] * 2, [padding] * 2, [1, 1], True, [stride - 1] * 2, groups


@pytest.mark.parametrize(("x", "weight", "stride", "padding", "groups"), KERNELS.values(), ids=KERNELS)
def test_a_transposed_convolution(x, weight, stride, padding, groups) -> None:
    args = (torch.randn(x), torch.randn(weight), None, *settings(stride, padding, groups))
    true, result = measured(lambda: aten.convolution.default(*args))

    assert temporaries.cpu(aten.convolution.default, args, result) == pytest.approx(true, rel=TOLERANCE)


@pytest.mark.parametrize("wanted", [[True, False, False], [False, True, False], [True, True, False]])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "one small image"])
def test_the_gradient_of_a_transposed_convolution(name, wanted) -> None:
    size, weight_size, *others = KERNELS[name]
    x, weight = torch.randn(size), torch.randn(weight_size)
    grad = torch.randn_like(aten.convolution.default(x, weight, None, *settings(*others)))
    args = (grad, x, weight, None, *settings(*others), wanted)
    true, result = measured(lambda: aten.convolution_backward.default(*args))

    assert temporaries.cpu(aten.convolution_backward.default, args, result) == pytest.approx(true, rel=TOLERANCE)


def seen_everywhere(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("repeated", ["x", "grad"])
def test_what_is_one_value_seen_everywhere_is_copied(repeated, layout) -> None:
    x = torch.randn(8, 32, 28, 28).contiguous(memory_format=layout)
    weight = torch.randn(32, 32, 3, 3).contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    x, grad = (seen_everywhere(x), grad) if repeated == "x" else (x, seen_everywhere(grad))
    args = (grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
    true, result = measured(lambda: aten.convolution_backward.default(*args))

    assert temporaries.cpu(aten.convolution_backward.default, args, result) == pytest.approx(true, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (torch.ones(256, 400, dtype=torch.bool), None),
        (torch.ones(256, 400), torch.float64),
        (torch.ones(256, 400), None),
        (torch.ones(256, 400, dtype=torch.bfloat16), torch.float32),
    ],
)
def test_a_sum_in_another_type_copies_what_it_adds_up(x, dtype) -> None:
    true, result = measured(lambda: x.sum(dtype=dtype))
    in_rows, sums = measured(lambda: x.sum(1, dtype=dtype))

    assert temporaries.cpu(aten.sum.default, (x,), result) == pytest.approx(true, abs=4096)
    assert temporaries.cpu(aten.sum.dim_IntList, (x, [1]), sums) == pytest.approx(in_rows, abs=4096)
