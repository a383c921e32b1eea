"""How to use a scheme in the Hugging Face Trainer: the lines that ``actbench fit`` prints to paste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InTrainer:
    """The lines of Python that use a scheme beside ``Trainer``.

    Attributes:
        callback: The specification by which the callback converts the model; empty for none.
        convert: The specification by which the model is converted before the trainer is made; empty for none.
        before: A line before the trainer is made, about ``model``.
        arguments: Arguments of ``TrainingArguments``, as code.
        optimizer: A wrapper of the optimizer, with ``{}`` for the optimizer, or a replacement of it, with ``{kind}``
            for Adam or AdamW and ``{rate}`` for the learning rate.
        why_not: Why Trainer cannot use the scheme; empty if it can.
    """

    callback: str = ""
    convert: str = ""
    before: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    why_not: str = ""
