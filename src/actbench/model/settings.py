"""The settings of a model and of its inputs, and the names that they take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator
from pydantic_core import to_json

from actbench.model.data import CaseData
from actbench.model.imagesizes import ImageSize
from actbench.model.packedrows import PackedRow
from actbench.units import Count

Task = Literal[
    "auto",
    "sequence-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "image-classification",
    "node-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "next-sentence-prediction",
    "pretraining",
    "masked-image-modeling",
    "semantic-segmentation",
    "depth-estimation",
    "object-detection",
    "audio-classification",
    "ctc",
    "speech-seq2seq",
    "image-text-contrastive",
    "image-text-to-text",
    "mask-generation",
    "text-to-image",
]
Attention = Literal["sdpa", "eager"]
FloatName = Literal["float32", "bfloat16", "float16"]
_SHORT: Final[dict[Any, FloatName]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def whole_name(value: Any) -> Any:
    """Return the full name of a dtype that is written ``fp32``, ``bf16`` or ``fp16``; else the value."""
    return _SHORT.get(value, value) if isinstance(value, str) else value


FloatType = Annotated[FloatName, BeforeValidator(whole_name)]
HalfType = Annotated[Literal["bfloat16", "float16"], BeforeValidator(whole_name)]
Optimizer = Literal[
    "adamw", "adamw-fused", "adamw-loop", "adam", "adafactor", "muon", "sgd", "sgd-momentum", "sgd-nesterov"
]
WeightsChoice = Literal["auto", "pretrained", "random"]
Cache = Literal["dynamic", "static", "fp8"]
"""How keys and values of earlier tokens are kept while a model writes: those names of transformers that are counted."""

_LATER: Final = ("target_length", "packed")
"""Settings that older records lack, and mean to have their default."""


class WorkloadSettings(CaseData):
    """Settings of a model and its inputs, shared by cases of every kind, saved models and sections of recipes.

    Attributes:
        sequence_length: Tokens of a sample; of what the encoder reads, if a decoder reads a text of its own.
        target_length: Tokens of what the decoder of an encoder-decoder model writes; None for as many as it reads.
        packed: Lengths of sequences that lie one behind the other in each row of a causal language model, such as
            ``512,1024,300``; None for rows of one sequence.
        image_size: Pixels of an edge of square images, or ``HEIGHTxWIDTH``.
    """

    task: Task = "auto"
    sequence_length: Count | None = None
    target_length: Count | None = None
    packed: PackedRow | None = None
    image_size: ImageSize | None = None
    attention: Attention = "sdpa"
    dtype: FloatType | None = None

    def _key(self, first: Iterable[str], later: Iterable[str] = ()) -> str:
        """Return a hash of the fields, in the order of the oldest files: the fields in ``first``, then the settings.

        Fields ``later``, which older cases lack, have no part in it where they have their default.
        """
        fields = type(self).model_fields
        unset = {name for name in (*later, *_LATER) if getattr(self, name) == fields[name].default}
        written = self.model_dump(mode="json", exclude=unset)
        order = dict.fromkeys((*first, *WorkloadSettings.model_fields, *written))
        text = to_json({name: written[name] for name in order if name in written}, inf_nan_mode="strings")
        return hashlib.sha256(text).hexdigest()[:16]
