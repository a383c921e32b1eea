"""Memory that kernels of CUDA take beside their results: sums and copies as measured on an H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actbench.simulator import profiles, temporaries

aten = torch.ops.aten
CUDA = temporaries.cuda(profiles.get("h200"))


def made(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor.to(memory_format=torch.channels_last) if last else tensor


def test_flash_attention_sums_the_gradient_of_queries_in_float32_tiles() -> None:
    batch, heads, rows, width = 2, 4, 200, 72
    query = torch.empty(batch, heads, rows, width, dtype=torch.bfloat16, device="meta")
    operator = aten._scaled_dot_product_flash_attention_backward.default

    needed = CUDA(operator, (query, query, query, query), None)

    assert needed == batch * heads * 256 * 96 * 4 + batch * heads * 256 * 4


NEAREST = 2**20  # what torch's allocator may leave at the end of a block, where it is not cut


@pytest.mark.parametrize(
    ("shape", "dims", "measured"),
    [
        ((4096, 3072), [0], 100_663_808),
        ((2048, 1024), [0], 16_777_728),
        ((50176, 384), [0], 138_412_544),
        ((12544, 768), [0], 77_595_136),
        ((3152, 3072), [0], 79_692_288),
        ((197, 16, 2304), [0, 1], 58_982_912),
        ((32, 1000), [0], 0),
        ((4096, 768), [1], 0),
    ],
    ids=str,
)
def test_the_buffer_of_a_sum_is_the_one_measured_on_an_h200(shape: Any, dims: list[int], measured: int) -> None:
    x = made(*shape)

    needed = CUDA(aten.sum.dim_IntList, (x, dims, True), x.sum(dims, True))

    assert 0 <= measured - needed <= NEAREST


def test_halves_are_summed_in_float32() -> None:
    x = made(1, 1024, 2048, dtype=torch.bfloat16)

    assert CUDA(aten.sum.dim_IntList, (x, [0, 1], True), x.sum((0, 1), True)) == 16_777_728


def test_a_card_with_fewer_processors_shares_a_sum_among_fewer_blocks() -> None:
    x = made(50176, 384)
    needed = [
        temporaries.cuda(profiles.get(name))(aten.sum.dim_IntList, (x, [0], True), x.sum(0, True))
        for name in ("t4", "a100-80gb", "h200")
    ]

    assert needed == sorted(set(needed))


@pytest.mark.parametrize(
    ("image", "weight", "stride", "padding", "forward", "backward"),
    [
        ((32, 3, 224, 224), (64, 3, 7, 7), 2, 3, 122_065_920, 134_522_368),
        ((32, 512, 28, 28), (1024, 512, 1, 1), 2, 0, 77_594_624, 81_788_928),
        ((32, 128, 56, 56), (128, 128, 3, 3), 2, 1, 65_011_712, 73_073_664),
        ((32, 256, 56, 56), (64, 256, 1, 1), 1, 0, 0, 2_097_152),
        ((32, 512, 28, 28), (128, 512, 1, 1), 1, 0, 0, 8_650_752),
        ((128, 64, 56, 56), (64, 64, 3, 3), 1, 1, 205_668_864, 207_733_760),
        ((128, 1024, 14, 14), (512, 1024, 1, 1), 1, 0, 0, 163_577_856),
    ],
    ids=str,
)
def test_the_copies_of_a_convolution_are_near_those_measured_on_an_h200(
    image: Any, weight: Any, stride: int, padding: int, forward: int, backward: int
) -> None:
    x, w = made(*image), made(*weight)
    settings = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
    result = aten.convolution.default(x, w, None, *settings)
    wanted = [True, True, False]
    tenth = max(12 * 2**20, 0.1 * (result.nbytes + x.nbytes))

    of_forward = CUDA(aten.convolution.default, (x, w, None, *settings), result)
    of_backward = CUDA(aten.convolution_backward.default, (result, x, w, None, *settings, wanted), (x, w, None))

    assert of_forward == pytest.approx(forward, abs=tenth)
    assert of_backward == pytest.approx(backward, abs=tenth)


def test_tensor_cores_copy_nothing_of_images_with_channels_last() -> None:
    x, w = made(32, 64, 56, 56, last=True), made(64, 64, 3, 3, last=True)
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1

    assert CUDA(aten.convolution.default, (x, w, None, *settings), x) == 0
    assert CUDA(aten.convolution_backward.default, (x, x, w, None, *settings, [True, True, False]), (x, w)) == 0


@pytest.mark.parametrize(
    ("card", "weight", "stride", "dilation", "groups", "needed"),
    [
        ("v100-32gb", (128, 1024, 3, 3), 1, 1, 1, 36 * 4 * (2 * 2 * 5 * (1024 + 128) + 1024 * 128)),
        ("v100-32gb", (128, 1024, 3, 3), 2, 1, 1, 0),
        ("v100-32gb", (128, 1024, 3, 3), 1, 2, 1, 0),
        ("v100-32gb", (128, 1024, 1, 1), 1, 1, 1, 0),
        ("v100-32gb", (1024, 4, 3, 3), 1, 1, 256, 0),
        ("h200", (128, 1024, 3, 3), 1, 1, 1, None),
    ],
)
def test_tiles_are_transformed_where_no_tensor_core_computes_in_float32(
    card: str, weight: Any, stride: int, dilation: int, groups: int, needed: int | None
) -> None:
    x, w = made(2, 1024, 8, 20), made(*weight)
    padding = dilation * (weight[2] // 2)
    settings = [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups
    result = aten.convolution.default(x, w, None, *settings)
    found = temporaries.cuda(profiles.get(card))

    of_forward = found(aten.convolution.default, (x, w, None, *settings), result)
    of_backward = found(aten.convolution_backward.default, (result, x, w, None, *settings, [True] * 3), (x, w, None))

    copied = x.nbytes + w.nbytes + result.nbytes
    assert of_forward == of_backward == (copied if needed is None else needed)


def test_the_gradient_of_a_softmax_is_multiplied_first() -> None:
    scores = made(32, 12, 128, 128)

    assert CUDA(aten._softmax_backward_data.default, (scores, scores, -1, torch.float32), scores) == scores.nbytes


def test_norms_copy_what_is_not_contiguous() -> None:
    x, turned = made(16, 197, 768), made(197, 16, 768).transpose(0, 1)
    for args, copies in (((x, [768]), 0), ((turned, [768]), 1)):
        assert CUDA(aten.native_layer_norm.default, args, None) == copies * x.nbytes
    for grad, image, copies in ((x, x, 0), (turned, x, 1), (turned, turned, 2)):
        assert CUDA(aten.native_layer_norm_backward.default, (grad, image, [768]), None) == copies * x.nbytes


@pytest.mark.parametrize("operator", [aten._softmax.default, aten._log_softmax.default])
def test_a_softmax_copies_what_is_not_contiguous(operator: Any) -> None:
    x = made(16, 32, 768)

    assert CUDA(operator, (x, 1, False), x) == 0
    assert CUDA(operator, (x.transpose(1, 2), 1, False), x) == x.nbytes


def test_several_dimensions_are_rolled_one_after_the_other() -> None:
    x = made(16, 56, 56, 96)

    assert CUDA(aten.roll.default, (x, [3], [1]), x) == 0
    assert CUDA(aten.roll.default, (x, [3, 3], [1, 2]), x) == x.nbytes


def test_a_batch_of_products_copies_an_expanded_operand_on_cuda() -> None:
    x, y = torch.ones(4, 8, 1).expand(4, 8, 16), torch.ones(4, 16, 2)

    assert CUDA(aten.bmm.default, (x, y), x @ y) == x.numel() * x.element_size()
    assert CUDA(aten.bmm.default, (x.contiguous(), y.mT.contiguous().mT), x @ y) == 0
