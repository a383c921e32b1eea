"""What one batch of a Hugging Face model looks like, from its config, its class and its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from actbench.errors import ModelError
from actbench.results.records import Case, Task
from actbench.setup import Batch
from actbench.workloads import base
from actbench.workloads.batches import audio, images, text

_IMAGES_ALONE: set[Task] = {
    *("image-classification", "semantic-segmentation", "depth-estimation", "object-detection"),
    "masked-image-modeling",
}
_WITHOUT_TEXT: set[Task] = {*_IMAGES_ALONE, "audio-classification"}
_WITH_IMAGES: set[Task] = {*_IMAGES_ALONE, "image-text-contrastive", "image-text-to-text"}
_WITH_AUDIO: set[Task] = {"audio-classification", "ctc", "speech-seq2seq"}


@dataclass(frozen=True)
class Sizes:
    """How large one sample is.

    Attributes:
        length: Tokens; None for models that read and write no text.
        image: Height and width in pixels; None for models that see no images.
        audio: ``(samples,)`` of a waveform, or the shape of its features; None for models that hear nothing.
    """

    length: int | None = None
    image: tuple[int, int] | None = None
    audio: tuple[int, ...] | None = None


def sizes(config: Any, task: Task, cls: Any, case: Case) -> Sizes:
    """Return how large samples are for a class of transformers.

    Args:
        config: Its config, with the image size that the case asks for.
        task: What it is trained for.
        cls: The class.
        case: May ask for a sequence length and an image size.

    Raises:
        ModelError: The sequence is longer than the model can read, images have no pixel, or nobody here knows the shape
            of its audio.
    """
    sees = task in _WITH_IMAGES or (task == "pretraining" and cls.main_input_name == "pixel_values")
    heard = audio.shape(config, cls, case.model) if task in _WITH_AUDIO else None
    if task in _WITHOUT_TEXT or (task == "pretraining" and sees):
        length = None
    elif task == "ctc":
        assert heard is not None
        length = audio.label_length(config, heard, case.sequence_length, case.model)
    else:
        length = text.sequence_length(config, case.sequence_length, case.model)
    image = images.size(config, case.image_size) if sees else None
    if image is not None and min(image) < 1:
        raise ModelError(f"model {case.model!r}: its config says images of {image[0]} x {image[1]} px")
    return Sizes(length, image, heard)


def make(config: Any, task: Task, cls: Any, sizes: Sizes, batch_size: int, dtype: torch.dtype, seed: int) -> Batch:
    """Make a batch of random samples with the labels of the task, by the names that the class gives its inputs.

    Returns:
        What :func:`text.batch`, :func:`images.batch` and :func:`audio.batch` say; for both text and images
        ``input_ids (batch_size, length)`` int64 with ``pixel_values (batch_size, channels, height, width)``, and
        ``labels`` where the model is to write the text.
    """
    random = base.generator(seed)
    if sizes.audio is not None:
        return audio.batch(config, task, cls, batch_size, sizes.audio, sizes.length, dtype, random)
    if sizes.image is None:
        assert sizes.length is not None
        return text.batch(config, task, batch_size, sizes.length, random)
    if sizes.length is None:
        return images.batch(config, task, batch_size, sizes.image, dtype, random)
    written = text.captions(config, task, cls, batch_size, sizes.length, random)
    return {"pixel_values": images.pixels(config, batch_size, sizes.image, dtype, random), **written}
