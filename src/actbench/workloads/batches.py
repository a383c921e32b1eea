"""What one batch of a Hugging Face model looks like, from its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError
from actbench.records import Task
from actbench.training import Batch
from actbench.workloads import inputs

USUAL_LENGTH = 128
USUAL_SIZE = 224
# These families count positions from padding id + 1 on, so that many rows of their position table are never used.
OFFSET_POSITIONS = (
    *("camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def sequence_length(config: Any, requested: int | None, spec: str) -> int:
    """Return the length of sequences: what was requested, else 128 or the longest that the model takes.

    Raises:
        ModelError: The request is longer than the table of positions.
    """
    longest = _longest_sequence(config)
    if requested is None:
        return USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest)
    if longest is not None and requested > longest:
        raise ModelError(f"--sequence-length {requested}: {spec} has positions for {longest} tokens at most")
    return requested


def text_batch(config: Any, task: Task, batch_size: int, length: int, seed: int) -> Batch:
    """Make full-length sequences of random tokens with the labels of a task.

    No attention mask is given: for sequences without padding it would be all ones, which the models drop after
    looking at its values, and fake tensors have none.

    Returns:
        ``input_ids (batch, length)`` int64; ``labels`` of the same shape, or ``(batch,)`` for a classification;
        for encoder-decoders ``decoder_input_ids (batch, length)`` as well.
    """
    random = inputs.generator(seed)
    text = config.get_text_config()
    end = token_ids(getattr(config, "eos_token_id", None))
    excluded = [*token_ids(getattr(config, "pad_token_id", None)), *end]

    def draw() -> Tensor:
        return inputs.tokens(batch_size, length, text.vocab_size, excluded, random)

    ids = draw()
    batch = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        if end:
            ids[:, -1] = end[0]  # classifiers of this kind read the state at the end of the sequence
        if task == "seq2seq-lm":
            batch["decoder_input_ids"] = draw()
    match task:
        case "sequence-classification":
            batch["labels"] = _class_labels(config, batch_size, random)
        case "masked-lm":
            batch["labels"] = inputs.masked_labels(ids, random)
        case "causal-lm":
            batch["labels"] = ids.clone()
        case _:
            batch["labels"] = draw()
    return batch


def image_batch(config: Any, batch_size: int, dtype: torch.dtype, seed: int) -> Batch:
    """Make ``pixel_values (batch, channels, height, width)`` of ``dtype`` and ``labels (batch,)``."""
    random = inputs.generator(seed)
    size = getattr(config, "image_size", None) or USUAL_SIZE
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    channels = getattr(config, "num_channels", None) or 3
    return {
        "pixel_values": inputs.images(batch_size, channels, (height, width), dtype, random),
        "labels": _class_labels(config, batch_size, random),
    }


def _class_labels(config: Any, batch_size: int, random: torch.Generator) -> Tensor:
    """Draw class ids, or floats where the config says regression (one label) or several labels at once."""
    if config.problem_type == "multi_label_classification":
        return torch.rand(batch_size, config.num_labels, generator=random).round()
    if config.num_labels == 1 or config.problem_type == "regression":
        return torch.rand(batch_size, generator=random)
    return inputs.classes(batch_size, config.num_labels, random)


def _longest_sequence(config: Any) -> int | None:
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0 or getattr(text, "rope_parameters", None):
        return None  # relative or rotary positions have no table to run out of
    if text.model_type in OFFSET_POSITIONS:
        positions -= int(text.pad_token_id) + 1
    return positions


def token_ids(value: int | list[int] | None) -> list[int]:
    """Return a special token of a config as a list: configs hold none, one or several ids."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
