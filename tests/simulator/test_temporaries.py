"""Memory that operators of torch take beside their results, as the allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.measuring.meters import footprint
from actbench.measuring.meters.cpumeter import AllocationTrace
from actbench.simulator import profiles, temporaries
from actbench.simulator.tracker import StorageTracker

aten = torch.ops.aten
CUDA = temporaries.cuda(profiles.get("h200"))

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


SLACK = 192 * 1024  # bytes: what oneDNN's threads hold of one image, and their buffers, are not modelled
CHANNELS = (*range(1, 18), 24)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def check_convolution(layout: torch.memory_format, **sizes: Any) -> None:
    dilation = sizes.pop("dilation", 1)
    x, weight, settings = operands(**sizes)
    x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    args = (x, weight, None, *settings[:2], [dilation] * 2, *settings[3:])
    true, result = true_temporaries(lambda: aten.convolution.default(*args))
    allowed = TOLERANCE * (true + footprint.stored_bytes([result])) + SLACK
    assert temporaries.cpu(aten.convolution.default, args, result) == pytest.approx(true, abs=allowed)

    grad = torch.randn_like(result)
    for wanted in ([True, False, False], [False, True, False], [True, True, False]):
        back = (grad, x, weight, None, *args[3:], wanted)
        true, gradients = true_temporaries(lambda back=back: aten.convolution_backward.default(*back))
        allowed = TOLERANCE * (true + footprint.stored_bytes(footprint.tensors_in(gradients))) + SLACK
        assert temporaries.cpu(aten.convolution_backward.default, back, gradients) == pytest.approx(true, abs=allowed)


@pytest.mark.sampled(fast=12, slow=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["first", "last"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_a_convolution_of_few_channels(channels: int, layout: torch.memory_format) -> None:
    for kernel, stride in ((3, 1), (3, 2), (1, 1)):
        check_convolution(
            layout,
            x=(16, channels, 40, 40),
            weight=(32, channels, kernel, kernel),
            stride=stride,
            padding=kernel // 2,
            groups=1,
        )


GROUPED = {
    "of strides": {"weight": (64, 16, 3, 3), "stride": 2, "padding": 1, "groups": 4},
    "pointwise, of strides": {"weight": (64, 16, 1, 1), "stride": 2, "padding": 0, "groups": 4},
    "narrow, of strides": {"weight": (64, 8, 3, 3), "stride": 2, "padding": 1, "groups": 8},
    "of two channels": {"weight": (64, 2, 3, 3), "stride": 1, "padding": 1, "groups": 32},
    "narrow, dilated": {"weight": (64, 8, 3, 3), "stride": 1, "padding": 2, "groups": 8, "dilation": 2},
    "dilated depthwise": {"weight": (64, 1, 3, 3), "stride": 1, "padding": 2, "groups": 64, "dilation": 2},
    "dilated depthwise, of strides": {"weight": (64, 1, 3, 3), "stride": 2, "padding": 2, "groups": 64, "dilation": 2},
    "wide depthwise": {"weight": (64, 1, 5, 5), "stride": 1, "padding": 2, "groups": 64},
    "dilated": {"weight": (32, 64, 3, 3), "stride": 1, "padding": 2, "groups": 1, "dilation": 2},
    "dilated, of strides": {"weight": (32, 64, 3, 3), "stride": 2, "padding": 2, "groups": 1, "dilation": 2},
}


@pytest.mark.sampled(fast=8, slow=6)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["first", "last"])
@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED.keys())
def test_a_convolution_of_groups_and_dilations(sizes: dict[str, Any], layout: torch.memory_format) -> None:
    check_convolution(layout, x=(16, 64, 40, 40), **sizes)


@pytest.mark.parametrize("height", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["first", "last"])
def test_a_depthwise_convolution_of_images_lower_than_its_kernel(layout: torch.memory_format, height: int) -> None:
    check_convolution(layout, x=(16, 480, height, 8), weight=(480, 1, 3, 3), stride=1, padding=1, groups=480)


def test_a_pointwise_weight_with_channels_last_decides_the_layout() -> None:
    x, weight = torch.randn(16, 192, 2, 2), torch.randn(1024, 192, 1, 1).to(memory_format=torch.channels_last)
    args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    grad = torch.randn_like(aten.convolution.default(*args)).contiguous(memory_format=torch.channels_last)
    back = (grad, x, weight, *args[2:], [True, True, False])

    true, result = true_temporaries(lambda: aten.convolution_backward.default(*back))

    assert temporaries.cpu(aten.convolution_backward.default, back, result) == pytest.approx(true, rel=TOLERANCE)


def test_a_slice_of_channels_is_copied_with_channels_last() -> None:
    whole = torch.randn(16, 128, 16, 16).contiguous(memory_format=torch.channels_last)
    x, weight = whole[:, :64], torch.randn(64, 64, 1, 1)
    args = (torch.randn_like(x), x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])

    true, result = true_temporaries(lambda: aten.convolution_backward.default(*args))

    assert temporaries.cpu(aten.convolution_backward.default, args, result) == pytest.approx(true, rel=TOLERANCE)


POOLS = {
    "maximum": lambda x: aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2], [0, 0], [1, 1], False),
    "average": lambda x: aten.avg_pool2d.default(x, [2, 2], [2, 2], [0, 0], False, True, None),
    "adaptive": lambda x: aten._adaptive_avg_pool2d.default(x, [7, 7]),
}


@pytest.mark.parametrize("of_gradient", LAYOUTS, ids=["grad first", "grad last"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["first", "last"])
@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_of_a_pool_is_computed_in_the_layout_of_its_output(name, layout, of_gradient) -> None:
    x = torch.randn(8, 16, 32, 32).contiguous(memory_format=layout)
    made = footprint.tensors_in(POOLS[name](x))
    grad = torch.randn_like(made[0]).contiguous(memory_format=of_gradient)
    args: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "maximum": (
            aten.max_pool2d_with_indices_backward.default,
            (grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, made[-1]),
        ),
        "average": (aten.avg_pool2d_backward.default, (grad, x, [2, 2], [2, 2], [0, 0], False, True, None)),
        "adaptive": (aten._adaptive_avg_pool2d_backward.default, (grad, x)),
    }
    operator, given = args[name]

    true, result = true_temporaries(lambda: operator(*given))

    assert temporaries.cpu(operator, given, result) == true


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["first", "last"])
def test_small_images_are_upsampled_with_channels_last(layout: torch.memory_format, size: int) -> None:
    args = (torch.randn(4, 16, size, size).contiguous(memory_format=layout), [2 * size, 2 * size], None, None)

    true, result = true_temporaries(lambda: aten.upsample_nearest2d.default(*args))

    assert temporaries.cpu(aten.upsample_nearest2d.default, args, result) == pytest.approx(true, abs=8192)


def test_a_bilinear_layer_and_its_gradients() -> None:
    one, other, weight, grad = torch.randn(40, 64), torch.randn(40, 32), torch.randn(8, 64, 32), torch.randn(40, 8)
    for args in (
        (one, weight, other, [1, 3], [0], [1, 2], [2, 3]),
        (grad, weight, other, [2, 3], [0], [1, 2], [1, 3]),
        (one, grad, other, [1, 3], [2, 3], [1, 2], [0]),
        (one, weight, grad, [1, 3], [0], [2, 3], [1, 2]),
    ):
        true, result = true_temporaries(lambda args=args: aten._trilinear.default(*args))

        assert temporaries.cpu(aten._trilinear.default, args, result) == true


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
def test_a_loss_is_reduced_from_one_for_each_element(name: str) -> None:
    operator, args = getattr(aten, name).default, (torch.rand(16, 3, 32, 32), torch.rand(16, 3, 32, 32))

    true, result = true_temporaries(lambda: operator(*args))
    with FakeTensorMode() as mode, StorageTracker() as tracker:
        fake = operator(*(mode.from_tensor(arg) for arg in args))
        left = tracker.live_bytes

    assert temporaries.cpu(operator, args, result) == pytest.approx(true, abs=1024)
    assert CUDA(operator, args, result) == temporaries.cpu(operator, args, result)
    assert fake.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    assert left >= fake.untyped_storage().nbytes()


def test_nothing_of_the_cpus_library_is_counted_for_a_cuda_device() -> None:
    x, weight, settings = operands((8, 4, 28, 28), (32, 4, 3, 3), 1, 1, 1)
    result = aten.convolution.default(x, weight, None, *settings)
    args = (torch.randn_like(result), x, weight, None, *settings, [True, True, False])
    gradients = aten.convolution_backward.default(*args)

    assert temporaries.cpu(aten.convolution_backward.default, args, gradients) > 0
    turing = temporaries.cuda(profiles.get("t4"))  # whose tensor cores do not take float32
    assert turing(aten.convolution_backward.default, args, gradients) == 0
    assert turing(aten.convolution.default, (x, weight, None, *settings), result) == 0


def test_safe_softmax() -> None:
    args = (torch.randn(8, 16, 256), -1)

    true, result = true_temporaries(lambda: aten._safe_softmax.default(*args))

    assert temporaries.cpu(aten._safe_softmax.default, args, result) == pytest.approx(true, rel=TOLERANCE)


def test_operators_without_temporaries_need_nothing() -> None:
    x = torch.randn(64, 64)
    for operator in (aten.mm.default, aten.add.Tensor):
        true, result = true_temporaries(lambda operator=operator: operator(x, x))

        assert temporaries.cpu(operator, (x, x), result) == true == 0


EXPANDED = {
    "expanded": lambda: torch.ones(()).expand(256, 512),
    "expanded and transposed": lambda: torch.ones(()).expand(512, 256).T,
    "every other column": lambda: torch.ones(256, 1024)[:, ::2],
    "transposed": lambda: torch.ones(512, 256).T,
    "a slice of columns": lambda: torch.ones(256, 1024)[:, :512],
    "one row": lambda: torch.ones(256, 1024)[3:4, :512],
}


@pytest.mark.parametrize("operand", EXPANDED)
def test_a_product_copies_an_operand_that_blas_cannot_read(operand: str) -> None:
    x, weight = EXPANDED[operand](), torch.ones(512, 384)
    true, result = true_temporaries(lambda: x @ weight)

    assert true == pytest.approx(temporaries.cpu(aten.mm.default, (x, weight), result), abs=4096)
    bias = torch.ones(384)
    assert temporaries.cpu(aten.addmm.default, (bias, x, weight), result) == pytest.approx(true, abs=4096)
    assert CUDA(aten.mm.default, (x, weight), result) == pytest.approx(true, abs=4096)


@pytest.mark.parametrize("softmax", [aten._softmax.default, aten._log_softmax.default])
def test_softmax_copies_what_is_not_contiguous(softmax: Any) -> None:
    scores = torch.randn(64, 256, 256)
    for x in (scores, scores[:, 10:], scores.transpose(0, 1)):
        true, result = true_temporaries(lambda: softmax(x, -1, False))  # noqa: B023

        assert temporaries.cpu(softmax, (x, -1, False), result) == pytest.approx(true, rel=TOLERANCE)


def _grad_of(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(()).expand(x.shape)


X = torch.rand(32, 64, 96).add_(0.5)
KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "columns of images": (aten.im2col.default, (torch.rand(4, 8, 32, 32), [3, 3], [1, 1], [0, 0], [1, 1])),
    "images of an expanded gradient": (
        aten.col2im.default,
        (_grad_of(torch.rand(4, 72, 900)), [32, 32], [3, 3], [1, 1], [0, 0], [1, 1]),
    ),
    "images that are larger than their columns": (
        aten.col2im.default,
        (torch.rand(4, 32, 64), [32, 32], [2, 2], [1, 1], [0, 0], [4, 4]),
    ),
    "a sort of long rows": (aten.sort.default, (torch.rand(4, 65536), -1)),
    "the k-th number": (aten.kthvalue.default, (X, 3, 1)),
    "the median of all": (aten.median.default, (X,)),
    "a roll of three dimensions": (aten.roll.default, (X, [1, 2, 3], [0, 1, 2])),
    "a roll of a transposed tensor": (aten.roll.default, (X.transpose(0, 2), [5], [])),
    "indices of 32 bits": (aten.gather.default, (X, 1, torch.zeros(32, 32, 96, dtype=torch.int32))),
    "distances of a batch": (
        aten._cdist_forward.default,
        (torch.rand(8, 1, 32, 16), torch.rand(1, 4, 32, 16), 1.0, None),
    ),
    "booleans times floats": (aten.mul.Tensor, (X > 1, X)),
    "integers divided": (aten.div.Tensor, (X.long(), X.int())),
    "integers compared with floats": (aten.eq.Tensor, (X.long(), X)),
    "layer norm of a transposed tensor": (aten.native_layer_norm.default, (X.transpose(0, 1), [96], None, None, 1e-5)),
    "group norm of a transposed tensor": (
        aten.native_group_norm.default,
        (X.transpose(0, 1), None, None, 64, 32, 96, 4, 1e-5),
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (*(torch.rand(2, 4, 300, 32) for _ in range(3)), 0.0, True),
    ),
    "the gradient of a margin": (aten.soft_margin_loss_backward.default, (torch.ones(()), X, X, 1)),
    "a transposed matrix": (aten.clone.default, (torch.rand(512, 256).T,)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_of_torch_takes(name: str) -> None:
    operator, args = KERNELS[name]
    options = {"memory_format": torch.contiguous_format} if operator is aten.clone.default else {}

    true, result = true_temporaries(lambda: operator(*args, **options))

    assert true > 2048
    assert temporaries.cpu(operator, args, result) == pytest.approx(true, rel=TOLERANCE, abs=64)
    on_cuda = (aten.im2col.default, aten.col2im.default, aten.roll.default, aten.soft_margin_loss_backward.default)
    if operator in (*on_cuda, aten._cdist_forward.default):  # whose code is that of all devices
        assert CUDA(operator, args, result) == temporaries.cpu(operator, args, result)


def test_a_cuda_device_converts_each_element() -> None:
    assert CUDA(aten.mul.Tensor, (X > 1, X), X) == 0


def test_many_long_rows_are_sorted_beside_their_tensor_on_cuda() -> None:
    """As an RTX 3090 had 704 MiB for sparsemax of 2048 x 8192 rows, and 328 MiB of half as long ones."""
    for rows, length, more in ((2048, 8192, 4 + 8 + 8), (2048, 4096, 0), (16, 8192, 0)):
        x = torch.empty(rows, length, device="meta")
        assert CUDA(aten.sort.default, (x, -1, True), torch.sort(x, -1)) == more * x.numel()


def test_the_gradient_of_a_sum_is_copied_for_rms_norm_on_cuda() -> None:
    """As an H100 had 40 MiB, five tensors, for the norm of 4096 x 1024 numbers of 16 bits."""
    x, scale = torch.empty(32, 64, device="meta"), torch.empty(32, 1, device="meta")
    args = (_grad_of(x), x, [64], scale, torch.empty(64, device="meta"), [True, True])

    assert CUDA(aten._fused_rms_norm_backward.default, args, x) == x.numel() * 4
    assert CUDA(aten._fused_rms_norm_backward.default, (x, *args[1:]), x) == 0
