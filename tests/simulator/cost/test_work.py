"""What an operator does: its operations, bytes and kernels, against what its definition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.cost.work import OperatorWork
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker

F32 = 4


def works(run: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[OperatorWork]:
    """Return what the operators of a function of fake tensors do."""
    recorder = Recorder(lambda: "forward")
    with fake_mode(), StorageTracker(observe=recorder.note):
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape in shapes]
        recorder.begin()
        run(*tensors)
    return [each.work for each in recorder.done if each.work.kind is not None]


@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 11), (64, 3, 2)])
def test_a_product_of_matrices_multiplies_and_adds_and_reads_both(rows: int, inner: int, columns: int) -> None:
    [product] = works(torch.mm, (rows, inner), (inner, columns))

    assert product.flops == 2 * rows * inner * columns
    assert product.moved == F32 * (rows * inner + inner * columns + rows * columns)
    assert (product.kind, product.precision, product.launches) == ("matmul", "fp32", 1)


def test_a_product_that_is_added_in_place_counts_as_one_that_is_not() -> None:
    [added] = works(lambda x, y, z: x.detach().addmm_(y.detach(), z.detach()), (5, 11), (5, 7), (7, 11))

    assert (added.kind, added.flops, added.is_known) == ("matmul", 2 * 5 * 7 * 11, True)


@pytest.mark.parametrize(
    ("groups", "kind"), [(1, "convolution"), (2, "grouped convolution"), (8, "depthwise convolution")]
)
def test_a_convolution_and_each_of_its_gradients_cost_the_same_operations(groups: int, kind: str) -> None:
    def run(x: Tensor, weight: Tensor) -> None:
        F.conv2d(x, weight, padding=1, groups=groups).sum().backward()  # type: ignore[no-untyped-call]

    done = works(run, (3, 8, 6, 5), (16, 8 // groups, 3, 3))
    forward = next(work for work in done if work.name == "convolution")
    backward = next(work for work in done if work.name == "convolution_backward")

    assert forward.flops == 2 * 3 * 16 * 6 * 5 * (8 // groups) * 9
    assert backward.flops == 2 * forward.flops
    assert backward.launches == 2
    assert {forward.kind, backward.kind} == {kind}


@pytest.mark.parametrize("last", [torch.channels_last, torch.channels_last_3d])
def test_a_convolution_with_channels_last_is_measured_alone_and_else_takes_what_others_took(
    last: torch.memory_format,
) -> None:
    dims = 2 if last is torch.channels_last else 3

    def labels(layout: torch.memory_format, wanted: str) -> list[tuple[str, ...]]:
        def run(x: Tensor, weight: Tensor) -> None:
            x, weight = (each.detach().contiguous(memory_format=layout) for each in (x, weight))
            convolve = F.conv2d if dims == 2 else F.conv3d
            x.requires_grad_("x" in wanted)
            weight.requires_grad_("weight" in wanted)
            convolve(x, weight, groups=2).sum().backward()  # type: ignore[operator, no-untyped-call]

        done = works(run, (2, 4) + (8,) * dims, (4, 2) + (3,) * dims)
        return [work.labels for work in done if "convolution" in work.name]

    both = [
        ("grouped convolution", "convolution"),
        ("grouped convolution_backward", "convolution_backward"),
    ]
    assert labels(torch.contiguous_format, "x, weight") == both
    assert labels(last, "x, weight") == [(f"{each[0]} with channels last", *each) for each in both]
    assert labels(last, "weight")[1][:2] == (
        "grouped convolution_backward of the weight with channels last",
        "grouped convolution_backward of the weight",
    )


def of_groups(
    groups: int, channels: int, dtype: torch.dtype, stride: int = 1, layout: torch.memory_format = torch.channels_last
) -> list[OperatorWork]:
    """Return what a convolution with groups of so many channels does, and what its gradients do."""

    def run(x: Tensor, weight: Tensor) -> None:
        x = x.contiguous(memory_format=layout)
        F.conv2d(x, weight, padding=1, groups=groups, stride=stride).sum().backward()  # type: ignore[no-untyped-call]

    shapes = (2, groups * channels, 8, 8), (groups * channels, channels, 3, 3)
    return [work for work in works(run, *shapes, dtype=dtype) if "convolution" in work.name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("groups", "channels"), [(2, 8), (31, 32), (33, 2)])
def test_only_the_gradients_of_uneven_groups_in_half_with_channels_last_run_on_general_kernels(
    groups: int, channels: int, dtype: torch.dtype
) -> None:
    forward, gradients = of_groups(groups, channels, dtype)
    single = of_groups(groups, channels, torch.float32)
    default = of_groups(groups, channels, dtype, layout=torch.contiguous_format)

    assert (forward.kind, forward.reached) == ("grouped convolution", 1.0)
    assert gradients.kind == "uneven grouped convolution"
    assert [(work.kind, work.reached) for work in [*single, *default]] == [("grouped convolution", 1.0)] * 4
    assert [forward.label, gradients.label] == [work.label for work in single]
    assert [forward.labels[1:], gradients.labels[1:]] == [work.labels for work in default]


def test_general_kernels_are_faster_by_the_root_of_the_width_and_pass_over_all_of_the_input() -> None:
    narrow, wide = (of_groups(3, channels, torch.float16)[1] for channels in (16, 64))
    strided = of_groups(3, 64, torch.float16, stride=2)[1]

    assert wide.reached == 2 * narrow.reached
    assert strided.reached == wide.reached / 4
    assert strided.flops == wide.flops / 4


@pytest.mark.parametrize(("channels", "reached"), [(4, 1.0), (64, 1.0), (96, 1.5), (320, 5.0), (640, 5.0)])
def test_groups_wider_than_64_channels_multiply_faster_in_half(channels: int, reached: float) -> None:
    default = of_groups(2, channels, torch.float16, layout=torch.contiguous_format)
    single = of_groups(2, channels, torch.float32)

    assert [work.reached for work in default] == [reached] * 2
    assert [work.reached for work in single] == [1.0] * 2
    assert of_groups(2, channels, torch.float16)[0].reached == reached


def test_a_convolution_in_half_copies_its_tensors_in_the_default_format_for_each_gradient_anew() -> None:
    images, kernel, output = 2 * 16 * 8 * 8, 24 * 16 * 3 * 3, 2 * 24 * 8 * 8

    def run(x: Tensor, weight: Tensor) -> None:
        F.conv2d(x, weight, padding=1).square().sum().backward()  # type: ignore[no-untyped-call]

    def alone(x: Tensor, weight: Tensor) -> None:
        run(x.detach(), weight)

    shapes = (2, 16, 8, 8), (24, 16, 3, 3)
    both, of_weight, single = (
        [work for work in works(each, *shapes, dtype=dtype) if "convolution" in work.name]
        for each, dtype in ((run, torch.float16), (alone, torch.bfloat16), (run, torch.float32))
    )

    once = 2 * 2 * (images + kernel + output)  # read and written, 2 bytes each
    assert [work.copied for work in both] == [once, 2 * once]
    assert [work.copied for work in of_weight] == [once, once]
    assert [work.launches for work in both] == [1 + 3, 2 + 6]
    assert [work.copied for work in single] == [0, 0]


@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_is_copied_with_channels_last(groups: int) -> None:
    def run(x: Tensor, weight: Tensor) -> None:
        x = x.contiguous(memory_format=torch.channels_last)
        F.conv2d(x, weight, padding=1, groups=groups).sum().backward()  # type: ignore[no-untyped-call]

    done = works(run, (2, 16, 8, 8), (24, 16 // groups, 3, 3), dtype=torch.float16)

    assert [work.copied for work in done if "convolution" in work.name] == [0, 0]


def test_half_of_the_channels_of_a_tensor_is_copied_as_a_whole_one_is() -> None:
    def run(x: Tensor, weight: Tensor) -> None:
        F.conv2d(x.chunk(2, 1)[0], weight, padding=1).square().sum().backward()  # type: ignore[no-untyped-call]

    done = works(run, (2, 16, 8, 8), (24, 8, 3, 3), dtype=torch.float16)
    [forward, backward] = [work for work in done if "convolution" in work.name]

    assert forward.copied == 2 * 2 * (2 * 8 * 8 * 8 + 24 * 8 * 3 * 3 + 2 * 24 * 8 * 8)
    assert backward.copied == 2 * forward.copied


def test_a_depthwise_convolution_has_kernels_of_its_own_for_the_default_format() -> None:
    done = of_groups(16, 1, torch.float16, layout=torch.contiguous_format)

    assert [(work.kind, work.copied) for work in done] == [("depthwise convolution", 0)] * 2


def test_a_transposed_convolution_passes_over_no_more_than_it_reads() -> None:
    def run(x: Tensor, weight: Tensor) -> None:
        F.conv_transpose2d(x, weight, groups=2, stride=2).sum().backward()  # type: ignore[no-untyped-call]

    [gradients] = [
        work
        for work in works(run, (2, 128, 8, 8), (128, 64, 3, 3), dtype=torch.float16)
        if work.name == "convolution_backward"
    ]

    assert gradients.reached == of_groups(2, 64, torch.float16)[1].reached


@pytest.mark.parametrize("groups", [32, 64])
def test_groups_that_tensor_cores_work_on_together_are_even_in_half_too(groups: int) -> None:
    done = of_groups(groups, 2, torch.float16)

    assert [(work.kind, work.reached) for work in done] == [("grouped convolution", 1.0)] * 2


def test_convolutions_use_tf32_and_matrices_do_not_as_torch_does_by_default() -> None:
    convolution = works(F.conv2d, (1, 4, 8, 8), (4, 4, 3, 3))[0]
    product = works(torch.mm, (8, 8), (8, 8))[0]
    half = works(torch.mm, (8, 8), (8, 8), dtype=torch.float16)[0]

    assert (convolution.precision, product.precision, half.precision) == ("tf32", "fp32", "half")


def test_views_move_nothing() -> None:
    assert works(lambda x: x.view(6, 4).t().unsqueeze(0).expand(3, 4, 6).detach(), (4, 6)) == []


def test_what_is_written_over_is_not_read_and_what_is_added_to_is() -> None:
    [copied] = works(lambda x, y: x.detach().copy_(y), (100,), (100,))
    [added] = works(lambda x, y: x.detach().add_(y.detach()), (100,), (100,))

    assert copied.moved == 2 * 100 * F32
    assert added.moved == 3 * 100 * F32


def test_a_tensor_that_is_made_like_another_reads_nothing_of_it() -> None:
    x = torch.Size((6, 5))
    scalar, like = works(lambda x: (x.new_zeros(()), torch.ones_like(x)), x)

    assert (scalar.moved, like.moved) == (F32, F32 * x.numel())


def test_both_gradients_of_a_convolution_move_what_each_moves_alone() -> None:
    shape, kernel = (3, 8, 6, 5), (16, 8, 3, 3)

    def moved(*wanted: bool) -> int:
        def run(x: Tensor, weight: Tensor) -> None:
            torch.ops.aten.convolution_backward(
                x.new_empty(3, 16, 6, 5), x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, [*wanted, False]
            )

        [backward] = works(run, shape, kernel)
        assert backward.launches == sum(wanted)
        return backward.moved

    # each reads input and weight here, of which the gradients of one need the other alone
    assert moved(True, True) == moved(True, False) + moved(False, True) - F32 * (3 * 8 * 6 * 5 + 16 * 8 * 9)


def test_an_embedding_reads_the_rows_that_it_takes() -> None:
    [taken] = works(lambda table: F.embedding(torch.zeros(10, dtype=torch.long), table), (1000, 16))[-1:]

    assert taken.moved == 2 * 10 * 16 * F32 + 10 * 8


def test_a_causal_kernel_computes_half_of_the_scores() -> None:
    def attend(causal: bool) -> int:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        done = works(lambda q: flash(q, q, q, 0.0, causal), (2, 4, 64, 32), dtype=torch.float16)
        return next(work.flops for work in done if work.kind == "attention")

    assert attend(True) == attend(False) // 2


@pytest.mark.parametrize(("tensors", "launches"), [(3, 1), (48, 1), (49, 2), (200, 5)])
def test_a_foreach_operator_takes_kernels_by_the_number_of_its_tensors(tensors: int, launches: int) -> None:
    def run(x: Tensor) -> None:
        torch._foreach_add_([x.detach().clone() for _ in range(tensors)], 1.0)

    done = [work for work in works(run, (10,)) if work.kind == "optimizer"]

    assert [work.launches for work in done] == [launches]
    assert done[0].moved == 2 * tensors * 10 * F32


def test_an_operator_that_nobody_knows_is_counted_by_its_bytes() -> None:
    library = torch.library.Library("costtest", "DEF")  # type: ignore[no-untyped-call]
    library.define("strange(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    torch.library.register_fake("costtest::strange", torch.empty_like, lib=library)
    try:
        [work] = works(lambda x: torch.ops.costtest.strange(x), (50,), dtype=torch.int32)
    finally:
        library._destroy()  # type: ignore[no-untyped-call]

    assert not work.is_known
    assert work.moved == 2 * 50 * 4


def test_a_conversion_is_measured_by_its_types_and_a_reduction_by_its_direction() -> None:
    def label(run: Any) -> str:
        return works(run, (6, 8))[-1].label

    assert label(lambda x: x.to(torch.bfloat16)) == "_to_copy float32 to bfloat16"
    assert label(lambda x: torch.empty(6, 8, dtype=torch.float64).copy_(x.detach())) == "copy_ float32 to float64"
    assert label(lambda x: torch.empty(6, 8).copy_(x.detach())) == "copy_"
    assert label(lambda x: x.sum(0)) == "sum of columns"
    assert label(lambda x: x.sum(1)) == "sum of rows"
    assert label(lambda x: x.sum()) == "sum"
    assert label(lambda x: x.detach().aminmax(dim=1)) == "aminmax of rows"
    assert label(lambda x: x.detach().aminmax()) == "aminmax"


def test_the_gradient_of_a_convolution_weight_alone_is_measured_alone() -> None:
    def labels(x_wanted: bool, weight_wanted: bool) -> list[str]:
        def run(x: Tensor, weight: Tensor) -> None:
            wanted = [each for each, is_wanted in ((x, x_wanted), (weight, weight_wanted)) if is_wanted]
            torch.autograd.grad(F.conv2d(x, weight).sum(), wanted)

        return [work.label for work in works(run, (2, 4, 8, 8), (4, 4, 3, 3)) if "backward" in work.name]

    assert labels(True, True) == ["convolution_backward"]
    assert labels(False, True) == ["convolution_backward of the weight"]
    assert labels(True, False) == ["convolution_backward of the input"]
