"""The batches of Hugging Face models, from config, class and task.

Audio is a waveform at 16 kHz, or features of it every 10 ms.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError
from actbench.model.imagesizes import ImageSize, edges
from actbench.model.packedrows import lengths
from actbench.model.records import Case, Task
from actbench.scheme.microbatches import Batch
from actbench.workload import base, losses, pictures, text

_IMAGES_ALONE: set[Task] = {
    *("image-classification", "semantic-segmentation", "depth-estimation", "object-detection"),
    *("masked-image-modeling", "mask-generation"),
}
_WITHOUT_TEXT: set[Task] = {*_IMAGES_ALONE, "audio-classification"}
_WITH_IMAGES: set[Task] = {*_IMAGES_ALONE, "image-text-contrastive", "image-text-to-text"}
_WITH_AUDIO: set[Task] = {"audio-classification", "ctc", "speech-seq2seq"}


@dataclass(frozen=True)
class Sizes:
    """How large one sample is; None for inputs that the model does not read.

    Attributes:
        length: Tokens.
        target: Tokens that the decoder writes, where the encoder reads others.
        packed: Tokens of each sequence in a row; empty for rows of one.
        image: Height and width in pixels.
        picture: Tokens that stand for a picture among those of the sample.
        audio: ``(samples,)`` of a waveform, or the shape of its features.
    """

    length: int | None = None
    image: tuple[int, int] | None = None
    audio: tuple[int, ...] | None = None
    picture: int | None = None
    target: int | None = None
    packed: tuple[int, ...] = ()


def sizes(config: Any, task: Task, cls: Any, case: Case) -> Sizes:
    """Return how large a sample for a transformers class is; the case may name a length and an image size.

    Raises:
        ModelError: The sequence is longer than the model can read, images have no pixel, or the shape of the audio is
            unknown.
    """
    if case.packed is not None:
        return _packed(config, task, cls, case, lengths(case.packed))
    sees = task in _WITH_IMAGES or (task == "pretraining" and cls.main_input_name == "pixel_values")
    heard = audio_shape(config, cls, case.model) if task in _WITH_AUDIO else None
    if task in _WITHOUT_TEXT or (task == "pretraining" and sees):
        length = None
    elif task == "ctc":
        assert heard is not None
        length = ctc_length(config, heard, case.sequence_length, case.model)
    else:
        length = text.sequence_length(config, case.sequence_length, case.model)
    target = length if task == "seq2seq-lm" else None
    if case.target_length is not None:
        if target is None:
            raise ModelError(f"--target-length: {case.model} does not read one text and write another; leave it out")
        target = text.sequence_length(config, case.target_length, case.model, flag="--target-length")
    image = image_size(config, case.image_size) if sees else None
    if image is not None and min(image) < 1:
        raise ModelError(f"model {case.model!r}: its config says images of {image[0]} x {image[1]} px")
    if image is None or config.model_type not in pictures.AMONG_TOKENS:
        return Sizes(length, image, heard, target=target)
    tokens = pictures.token_count(config, cls, image, case.model)
    if case.sequence_length is None:
        length = text.sequence_length(config, None, case.model) + tokens
    elif case.sequence_length <= tokens:
        raise ModelError(
            f"--sequence-length {case.sequence_length}: the picture of {image[0]} x {image[1]} px takes {tokens} "
            "tokens of a sequence; ask for more, or for a smaller --image-size"
        )
    return Sizes(length, image, heard, tokens)


def _packed(config: Any, task: Task, cls: Any, case: Case, packed: tuple[int, ...]) -> Sizes:
    """Return the sizes of rows that hold several sequences; a ModelError if the model does not take them apart."""
    if task != "causal-lm" or "position_ids" not in inspect.signature(cls.forward).parameters:
        raise ModelError(
            f"--packed: {case.model} does {task} by {cls.__name__}; causal language models that take positions read "
            "several sequences in a row"
        )
    if case.sequence_length is not None:
        raise ModelError("--packed gives the lengths of all sequences of a row; leave --sequence-length out")
    text.sequence_length(config, max(packed), case.model, flag="--packed")
    return Sizes(sum(packed), packed=packed)


def make(config: Any, task: Task, cls: Any, sizes: Sizes, batch_size: int, dtype: torch.dtype, seed: int) -> Batch:
    """Make a batch of random samples with the labels of the task, under the input names of the class.

    Returns:
        The batch of :func:`text.batch`, :func:`image_batch` or :func:`audio_batch`; for text with images,
        ``input_ids (batch_size, length)`` int64, ``pixel_values (batch_size, channels, height, width)``, and
        ``labels`` if the model writes the text.
    """
    random = base.generator(seed)
    if sizes.audio is not None:
        return audio_batch(config, task, cls, batch_size, sizes.audio, sizes.length, dtype, random)
    if sizes.image is None:
        assert sizes.length is not None
        made = text.batch(config, task, batch_size, sizes.length, random, sizes.target)
        return text.packed(made, sizes.packed) if sizes.packed else made
    if sizes.length is None:
        return image_batch(config, task, batch_size, sizes.image, dtype, random)
    if sizes.picture is not None:
        return pictures.batch(config, cls, sizes.picture, batch_size, sizes.length, sizes.image, dtype, random)
    written = text.captions(config, task, cls, batch_size, sizes.length, random)
    return {"pixel_values": pixels(config, batch_size, sizes.image, dtype, random), **written}


# the crop that models are trained on with ImageNet
_USUAL_SIZE = 224
OBJECTS = 8  # COCO has 7.3 per image
MASKED_SHARE = 0.6  # of the patches, as SimMIM hides them (Xie et al. 2021, arXiv 2111.09886)


def image_part(config: Any) -> Any:
    """Return the part of a config with the image size: the config itself, its vision tower's or its backbone's."""
    parts = (config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config")))
    return next((found for found in parts if getattr(found, "image_size", None)), config)


def image_size(config: Any, requested: ImageSize | None) -> tuple[int, int]:
    """Return height and width: the requested ones, else the config's, else 224 pixels."""
    if requested is not None:
        return edges(requested)
    found = getattr(image_part(config), "image_size", None) or _USUAL_SIZE
    return (found, found) if isinstance(found, int) else (found[0], found[1])


def image_batch(
    config: Any, task: Task, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> Batch:
    """Make images with the labels of a task.

    Returns:
        ``pixel_values (batch, channels, height, width)`` of ``dtype`` and ``labels``. Classification: ``(batch,)``;
        segmentation: ``(batch, height, width)`` int64; depth: ``(batch, height, width)`` of ``dtype``; detection: a
        list with ``class_labels (8,)`` int64 and ``boxes (8, 4)``, centers and sizes as shares of the image, for each
        image. Masked images have ``bool_masked_pos (batch, patches)`` in place of labels, images with a prompt one
        point each, ``input_points (batch, 1, 1, 2)`` in pixels and ``input_labels (batch, 1, 1)`` int64, and the object
        there, ``TARGET (batch, height, width)`` of ``dtype`` at a fourth of the image's size.
    """
    made: dict[str, Any] = {"pixel_values": pixels(config, batch_size, size, dtype, random)}
    match task:
        case "semantic-segmentation":
            made["labels"] = torch.randint(max(2, config.num_labels), (batch_size, *size), generator=random)
        case "depth-estimation":
            # GLPN's loss takes the logarithm of depths above 0 only (SiLogLoss of modeling_glpn.py of transformers)
            made["labels"] = 1 + torch.rand(batch_size, *size, generator=random).to(dtype)
        case "object-detection":
            made["labels"] = [_objects(config.num_labels, dtype, random) for _ in range(batch_size)]
        case "masked-image-modeling":
            made["bool_masked_pos"] = torch.rand(batch_size, _patches(config, size), generator=random) < MASKED_SHARE
        case "mask-generation":
            made |= _prompted(config, batch_size, size, dtype, random)
        case "pretraining":
            pass  # these models draw their own mask
        case _:
            made["labels"] = base.class_labels(config, batch_size, random)
    return made


def pixels(config: Any, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Draw images ``(batch_size, channels, height, width)`` of ``dtype`` with the channels of the config."""
    channels = getattr(image_part(config), "num_channels", None) or 3
    return base.images(batch_size, channels, size, dtype, random)


def _objects(classes: int, dtype: torch.dtype, random: torch.Generator) -> dict[str, Tensor]:
    # with these centers and extents no box reaches beyond the image
    centers = 0.3 + 0.4 * torch.rand(OBJECTS, 2, generator=random)
    extents = 0.1 + 0.4 * torch.rand(OBJECTS, 2, generator=random)
    return {
        "class_labels": base.classes(OBJECTS, classes, random),
        "boxes": torch.cat([centers, extents], dim=1).to(dtype),
    }


def _prompted(
    config: Any, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    # the decoder of SAM upsamples the grid of patches twice (SamMaskDecoder of transformers)
    height, width = (4 * edge // config.vision_config.patch_size for edge in size)
    points = torch.rand(batch_size, 1, 1, 2, generator=random) * torch.tensor([size[1], size[0]])
    return {
        "input_points": points.to(dtype),
        "input_labels": torch.ones(batch_size, 1, 1, dtype=torch.int64),
        losses.TARGET: torch.rand(batch_size, height, width, generator=random).round().to(dtype),
    }


def _patches(config: Any, size: tuple[int, int]) -> int:
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])
    return (size[0] // height) * (size[1] // width)


SECONDS = 10
# waveforms of 16 kHz, and features of every 10 ms, as transformers' feature extractors make them
SAMPLES = SECONDS * 16_000
FRAMES = SECONDS * 100


def audio_shape(config: Any, cls: Any, spec: str) -> tuple[int, ...]:
    """Return the shape of one sample: 10 seconds, or the only length that the model takes.

    Returns:
        ``(samples,)`` for a waveform; ``(frames, features)`` for features, for Whisper ``(features, frames)``.

    Raises:
        ModelError: The class takes audio in an unknown form.
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
        # Whisper's second convolution halves the frames, before its table of positions
        found = (config.num_mel_bins, 2 * config.max_source_positions)
    elif encoder is not config and hasattr(encoder, "num_mel_bins"):
        found = (FRAMES, encoder.num_mel_bins)
    if name != "input_features" or found is None:
        raise ModelError(
            f"model {spec!r} is a {cls.__name__}, and actbench does not know what audio it takes: write a function "
            "that builds it and makes its batches, and give file.py:function"
        )
    return found


def ctc_length(config: Any, heard: tuple[int, ...], requested: int | None, spec: str) -> int:
    """Return the number of tokens of a CTC sample: at most half the frames, as CTC needs a blank between repeats.

    Raises:
        ModelError: The request is longer.
    """
    encoder = getattr(config, "encoder_config", config)
    stride = (
        math.prod(getattr(config, "conv_stride", ())) if len(heard) == 1 else getattr(encoder, "subsampling_factor", 1)
    )
    longest = heard[0] // stride // 2
    if requested is not None and requested > longest:
        raise ModelError(
            f"--sequence-length {requested}: {spec} makes {heard[0] // stride} frames of {SECONDS} s of audio, enough "
            f"for CTC to spell {longest} tokens at most"
        )
    return requested or min(text.USUAL_LENGTH, longest)


def audio_batch(
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
        ``input_values`` or ``input_features (batch, *heard)`` of ``dtype``; ``labels (batch,)`` for classification,
        else ``(batch, length)`` int64, and ``decoder_input_ids`` of the same shape if a decoder reads them.
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
