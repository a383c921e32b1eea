"""Batches of models that read pictures beside their tokens: Llava, Qwen-VL, PaliGemma, Idefics, Mllama and others."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from actbench.errors import ModelError, boundary
from actbench.scheme.microbatches import IGNORED_LABEL, Batch
from actbench.simulator.fake import fake_mode, to_fake
from actbench.simulator.overrides import known_scalars
from actbench.workload import base, text

_IN_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # a row for each patch, and the grid of each picture
_IN_ROWS = ("idefics2", "idefics3", "smolvlm")  # several pictures a sample
_IN_TILES = ("mllama",)  # read by cross-attention: one token stands for a picture
AMONG_TOKENS = (*_IN_PATCHES, *_IN_ROWS, *_IN_TILES, "gemma3", "internvl", "llava", "paligemma", "vipllava")
"""Kinds of models whose batches this file makes, one picture a sample."""


def token_count(config: Any, cls: Any, size: tuple[int, int], spec: str) -> int:
    """Return how many tokens stand for one picture of this size.

    The image encoder of the model says it, which runs on fake tensors.

    Raises:
        ModelError: The model cannot be built from its config, or encode such a picture.
    """
    if config.model_type in _IN_TILES:
        return 1
    random, mode = base.generator(0), fake_mode()
    model: Any
    with boundary(f"model {spec!r} cannot be built from its config", ModelError):
        model = to_fake(
            base.construct(lambda: cls._from_config(copy.deepcopy(config)), materialize=False, seed=0), mode
        )
    with mode, torch.no_grad(), known_scalars(model), boundary(f"model {spec!r} reads no {size} px", ModelError):
        found: Any = model.get_image_features(**_encoded(config, 1, size, torch.float32, random))
    features = found if isinstance(found, Tensor) else found.pooler_output
    return sum(leaf.shape[:-1].numel() for leaf in tree_leaves(features))


def batch(
    config: Any,
    cls: Any,
    tokens: int,
    batch_size: int,
    length: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    random: torch.Generator,
) -> Batch:
    """Make sequences that begin with a picture, with labels for all tokens behind it.

    Returns:
        ``input_ids`` and ``labels (batch_size, length)`` int64, whose first ``tokens`` stand for the picture;
        ``pixel_values`` of ``dtype``, and its grids, tiles and masks, as the model takes them. If the model reads them,
        ``mm_token_type_ids`` or ``token_type_ids (batch_size, length)`` int64, 1 at the picture.
    """
    special = [value for name, value in vars(config).items() if name.endswith(_SPECIAL) and isinstance(value, int)]
    ids = text.draw(config, batch_size, length, random, special)
    ids[:, :tokens] = image_token(config)
    labels = ids.clone()
    labels[:, :tokens] = IGNORED_LABEL
    made = {"input_ids": ids, "labels": labels, **_encoded(config, batch_size, size, dtype, random)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inspect.signature(cls.forward).parameters:
            made[name] = torch.zeros_like(ids)
            made[name][:, :tokens] = 1
    if config.model_type in _IN_TILES:
        made["cross_attention_mask"] = torch.ones(batch_size, length, 1, _tiles(config), dtype=torch.int64)
    return made


_SPECIAL = ("token_id", "token_index")


def image_token(config: Any) -> int:
    """Return the id of the token that stands for a picture, or for a part of it."""
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)


def _tiles(config: Any) -> int:
    return int(config.vision_config.max_num_tiles)


def _encoded(
    config: Any, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    """Make what the image encoder reads for one picture of each sample."""
    vision, kind = config.vision_config, config.model_type
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    if kind in _IN_PATCHES:
        side, merged = vision.patch_size, vision.patch_size * vision.spatial_merge_size
        grid = [max(1, edge // merged) * vision.spatial_merge_size for edge in size]
        values = channels * vision.temporal_patch_size * side**2
        patches = torch.randn(batch_size * grid[0] * grid[1], values, generator=random).to(dtype)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, *grid]] * batch_size)}
    if kind in _IN_TILES:
        tiles = _tiles(config)
        found = base.images(batch_size * tiles, channels, size, dtype, random)
        return {
            "pixel_values": found.view(batch_size, 1, tiles, channels, *size),
            "aspect_ratio_ids": torch.ones(batch_size, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.int64),
        }
    found = base.images(batch_size, channels, size, dtype, random)
    return {"pixel_values": found[:, None] if kind in _IN_ROWS else found}
