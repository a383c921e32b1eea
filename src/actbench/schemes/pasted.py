"""How a scheme is had in the Hugging Face Trainer: what ``actbench fit`` prints to paste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InTrainer:
    """What a scheme becomes beside ``Trainer``, as lines of Python.

    Attributes:
        callback: The specification that the callback converts the model by; empty for nothing.
        convert: The specification that the model is converted by before the trainer is made; empty for nothing.
        before: A line before the trainer is made, about ``model``.
        arguments: Of ``TrainingArguments``, as code.
        optimizer: What is put around the optimizer, with ``{}`` in its place, or in its stead, with ``{kind}`` for Adam
            or AdamW and ``{rate}`` for the learning rate.
        why_not: Why it cannot be had there; empty where it can.
    """

    callback: str = ""
    convert: str = ""
    before: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    why_not: str = ""
