"""Batches of audio: waveforms at 16 kHz, or features of them every 10 ms."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError
from actbench.results.records import Task
from actbench.setup import Batch
from actbench.workloads import base
from actbench.workloads.batches import text

SECONDS = 10
SAMPLES = SECONDS * 16_000
FRAMES = SECONDS * 100


def shape(config: Any, cls: Any, spec: str) -> tuple[int, ...]:
    """Return the shape of one sample: 10 seconds, or as many as a model that takes one length only does.

    Returns:
        ``(samples,)`` of a waveform; of features ``(frames, features)``, for Whisper ``(features, frames)``.

    Raises:
        ModelError: The class takes audio in a form that is not known here.
    """
    name = cls.main_input_name
    if name == "input_values":
        return (config.max_length, config.num_mel_bins) if hasattr(config, "frequency_stride") else (SAMPLES,)
    encoder = getattr(config, "encoder_config", config)
    found: tuple[int, ...] | None = None
    if hasattr(config, "input_feat_per_channel"):
        found = (min(FRAMES, config.max_source_positions), config.input_feat_per_channel * config.input_channels)
    elif hasattr(config, "feature_projection_input_dim"):
        found = (FRAMES, config.feature_projection_input_dim)
    elif hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        found = (config.num_mel_bins, 2 * config.max_source_positions)
    elif encoder is not config and hasattr(encoder, "num_mel_bins"):
        found = (FRAMES, encoder.num_mel_bins)
    if name != "input_features" or found is None:
        raise ModelError(
            f"model {spec!r} is a {cls.__name__}, and actbench does not know what audio it takes: write a function "
            "that builds it and makes its batches, and give file.py:function"
        )
    return found


def label_length(config: Any, heard: tuple[int, ...], requested: int | None, spec: str) -> int:
    """Return how many tokens a sample of CTC has: at most half as many as frames, so that repeats can be told apart.

    Raises:
        ModelError: More were requested.
    """
    encoder = getattr(config, "encoder_config", config)
    stride = math.prod(getattr(config, "conv_stride", ())) if len(heard) == 1 else _subsampling(encoder)
    longest = heard[0] // stride // 2
    if requested is not None and requested > longest:
        raise ModelError(
            f"--sequence-length {requested}: of {SECONDS} s of audio {spec} makes {heard[0] // stride} frames, which "
            f"CTC can spell {longest} tokens with"
        )
    return requested or min(text.USUAL_LENGTH, longest)


def batch(
    config: Any,
    task: Task,
    cls: Any,
    batch_size: int,
    heard: tuple[int, ...],
    length: int | None,
    dtype: torch.dtype,
    random: torch.Generator,
) -> Batch:
    """Make audio with the labels of a task.

    Returns:
        ``input_values`` or ``input_features (batch, *heard)`` of ``dtype``; ``labels (batch,)`` of a classification, or
        ``(batch, length)`` int64, with ``decoder_input_ids`` of the same shape where a decoder reads them.
    """
    sound = torch.randn(batch_size, *heard, generator=random).to(dtype)
    made: dict[str, Tensor] = {cls.main_input_name: sound}
    if length is None:
        made["labels"] = base.class_labels(config, batch_size, random)
        return made
    made["labels"] = text.draw(config, batch_size, length, random)
    if "decoder_input_ids" in inspect.signature(cls.forward).parameters:
        made["decoder_input_ids"] = text.draw(config, batch_size, length, random)
    return made


def _subsampling(config: Any) -> int:
    return int(getattr(config, "subsampling_factor", 1))
