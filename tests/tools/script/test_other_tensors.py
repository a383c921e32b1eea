"""Tensors of classes of their own, parameters without a shape yet, and tensors made while functions are transformed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import actbench

SHAPE = (4, 3, 256, 256)


class Image(Tensor):
    """A picture, as libraries of pictures have classes for."""


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_subclass": lambda picture: picture.as_subclass(Image),
    "_make_subclass": lambda picture: Tensor._make_subclass(Image, picture),  # type: ignore[attr-defined]
}


def trained(pictures: Callable[[], Tensor]) -> tuple[type, int]:
    """Return the class of the pictures on the card, and the peak of a step with them."""
    with actbench.simulate("rtx-4090") as card:
        model = nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            given = pictures().cuda()
            model(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return type(given), card.peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_gets_a_class_of_its_own(way: str) -> None:
    _, plain = trained(lambda: torch.rand(SHAPE))

    kind, peak = trained(lambda: WAYS[way](torch.rand(SHAPE)))

    assert issubclass(kind, Image)
    assert peak == plain


def dry_run_of(model: nn.Module, *, is_moved_first: bool) -> int:
    """Return the peak of a step of a model that runs once, before or after it moves to the card."""
    with actbench.simulate("rtx-4090") as card, torch.no_grad():
        if is_moved_first:
            model.to("cuda")
        model(torch.zeros(1, 32, device="cuda" if is_moved_first else "cpu"))
        model.to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        with torch.enable_grad():
            for _ in range(5):
                model(torch.randn(16, 32, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return card.peak_bytes


@pytest.mark.parametrize("is_small", [True, False])
def test_lazy_modules_move_before_their_dry_run(is_small: bool) -> None:
    width = 64 if is_small else 1024

    def made() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.LazyLinear(10))

    assert dry_run_of(made(), is_moved_first=True) == dry_run_of(made(), is_moved_first=False)


def test_tensors_are_made_while_a_function_is_transformed() -> None:
    with actbench.simulate("rtx-4090"):
        rows = torch.arange(4, device="cuda")
        chosen = torch.vmap(lambda row: torch.tensor(True, device="cuda") & (row >= 2))(rows)
        scaled = torch.vmap(lambda row: torch.tensor([1.0, 2.0], device="cuda") * row)(rows)
        leaf = torch.tensor([1.0], device="cuda", requires_grad=True)

        assert (chosen.tolist(), chosen.is_cuda) == ([False, False, True, True], True)
        assert (scaled.shape, scaled.is_cuda) == ((4, 2), True)
        assert leaf.requires_grad
        assert leaf.is_leaf


def test_blocks_of_a_mask_are_found() -> None:
    with actbench.simulate("rtx-4090"):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cuda")

        assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
        assert mask.full_kv_num_blocks is not None
        assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
        assert mask.kv_indices.is_cuda


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_trains_with_a_mask_of_blocks() -> None:
    with actbench.simulate("rtx-4090") as card:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cuda")
        layer = nn.Linear(256, 768).cuda()
        optimizer = torch.optim.AdamW(layer.parameters())
        for _ in range(4):
            given = torch.randn(4, 512, 256, device="cuda")
            query, key, value = layer(given).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            flex_attention(query, key, value, block_mask=mask).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    scores = 4 * 4 * 512 * 512 * 4
    assert card.peak_bytes > scores
