"""Batches of text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError
from actbench.model.records import Task
from actbench.scheme.microbatches import Batch
from actbench.workload import base

USUAL_LENGTH = 128
CHOICES = 2
# These families count positions from padding id + 1; they never use the rows of the position table before it.
OFFSET_POSITIONS = (
    *("camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# Their pretraining tells replaced tokens from original ones: a label is 0 or 1.
DISCRIMINATORS = ("electra", "funnel")


def sequence_length(config: Any, requested: int | None, spec: str, flag: str = "--sequence-length") -> int:
    """Return the length of sequences: the requested one, else 128, or the longest of the model if that is less.

    Raises:
        ModelError: The request is longer than the table of positions.
    """
    longest = longest_sequence(config)
    if requested is None:
        return USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest)
    if longest is not None and requested > longest:
        raise ModelError(f"{flag} {requested}: {spec} has positions for {longest} tokens at most")
    return requested


def batch(
    config: Any, task: Task, batch_size: int, length: int, random: torch.Generator, target: int | None = None
) -> Batch:
    """Make full-length sequences of random tokens with the labels of a task.

    The batch has no attention mask: without padding it is all ones, and models drop it after they look at its values,
    which fake tensors do not have.

    Returns:
        ``input_ids (batch, length)`` int64, for multiple choice ``(batch, 2, length)``; ``labels`` of the same shape,
        or ``(batch,)`` if a whole sample has one label; for encoder-decoders ``decoder_input_ids`` and ``labels
        (batch, target)``; for question answering ``start_positions`` and ``end_positions (batch,)``.
    """
    ids = draw(config, batch_size * (CHOICES if task == "multiple-choice" else 1), length, random)
    made = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        _end(config, ids)  # encoder-decoder classifiers read the state at the end token
        if task == "seq2seq-lm":
            made["decoder_input_ids"] = draw(config, batch_size, target or length, random)
    if task == "multiple-choice":
        made["input_ids"] = ids.view(batch_size, CHOICES, length)
    return made | _labels(config, task, ids, batch_size, random, target or length)


def packed(batch: Batch, lengths: Sequence[int]) -> Batch:
    """Return a batch whose rows are several sequences, as transformers' ``DataCollatorWithFlattening`` makes them.

    Returns:
        The batch, with ``position_ids (batch, length)`` int64 that begin anew with each sequence, and ``labels`` that
        are -100 at the first token of each, which nothing predicts.
    """
    rows = len(batch["input_ids"])
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(rows, 1)
    return {**batch, "position_ids": positions, "labels": batch["labels"].masked_fill(positions == 0, -100)}


def _labels(
    config: Any, task: Task, ids: Tensor, batch_size: int, random: torch.Generator, target: int
) -> dict[str, Tensor]:
    length = ids.shape[1]
    match task:
        case "sequence-classification":
            return {"labels": base.class_labels(config, batch_size, random)}
        case "token-classification":
            return {"labels": torch.randint(config.num_labels, ids.shape, generator=random)}
        case "multiple-choice":
            return {"labels": base.classes(batch_size, CHOICES, random)}
        case "next-sentence-prediction":
            return {"labels": base.classes(batch_size, 2, random)}
        case "question-answering":
            places = ("start_positions", "end_positions")
            return {name: base.classes(batch_size, length, random) for name in places}
        case "masked-lm":
            return {"labels": base.masked_labels(ids, random)}
        case "pretraining":
            return _pretraining_labels(config, ids, random)
        case "causal-lm":
            return {"labels": ids.clone()}
    return {"labels": draw(config, batch_size, target, random)}


def captions(config: Any, task: Task, cls: Any, batch_size: int, length: int, random: torch.Generator) -> Batch:
    """Make the text that goes with images.

    Returns:
        ``input_ids (batch, length)`` int64, and ``labels`` of the same shape if the task is to write the text. If only
        the decoder reads text, ``decoder_input_ids`` in place of ``input_ids``.
    """
    ids = draw(config, batch_size, length, random)
    _end(config, ids)  # the state at the end token stands for the whole text
    if task == "image-text-contrastive":
        return {"input_ids": ids}
    reads = "input_ids" if "input_ids" in inspect.signature(cls.forward).parameters else "decoder_input_ids"
    return {reads: ids, "labels": ids.clone()}


def draw(config: Any, batch_size: int, length: int, random: torch.Generator, special: Iterable[int] = ()) -> Tensor:
    """Draw token ids ``(batch_size, length)`` int64 without padding, end and further special tokens."""
    excluded = [*special, *special_ids(config, "pad_token_id"), *special_ids(config, "eos_token_id")]
    return base.tokens(batch_size, length, config.get_text_config().vocab_size, excluded, random)


def special_ids(config: Any, name: str) -> list[int]:
    """Return the ids of a special token in a config, or else in its text part: none, one or several."""
    value = getattr(config, name, None)
    if value is None:
        value = getattr(config.get_text_config(), name, None)
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _end(config: Any, ids: Tensor) -> None:
    end = special_ids(config, "eos_token_id")
    # a changed vocab_size may leave no row for the end token
    if end and end[0] < config.get_text_config().vocab_size:
        ids[:, -1] = end[0]


def _pretraining_labels(config: Any, ids: Tensor, random: torch.Generator) -> dict[str, Tensor]:
    if config.model_type in DISCRIMINATORS:
        return {"labels": torch.randint(2, ids.shape, generator=random)}
    order = "sentence_order_label" if config.model_type == "albert" else "next_sentence_label"
    return {"labels": base.masked_labels(ids, random), order: base.classes(len(ids), 2, random)}


def longest_sequence(config: Any) -> int | None:
    """Return the number of positions in the table of a model; None for one without a table."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    if not isinstance(positions, int) or positions <= 0 or getattr(text, "rope_parameters", None):
        return None  # relative and rotary positions have no table, so no limit
    if text.model_type in OFFSET_POSITIONS:
        positions -= int(text.pad_token_id) + 1
    return positions
