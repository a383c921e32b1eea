"""Data in the shapes that public scripts read, made up: a simulated step needs sizes, and nobody looks at the rest."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

_WORDS = 50256
"""Tokens of GPT-2 without the one that ends a document."""

_MAGIC, _VERSION = 20240520, 1
_LONGEST = 1500


def tokens(folder: Path) -> None:
    """Write files of GPT-2's tokens as llm.c and modded-nanogpt read them: a header of 256 integers, then 16 bits each.

    Documents have 50 to 1,500 tokens. The numbers of tokens are enough for a validation and a hundred steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    for name, count in {"train_000001": 40_000_000, "train_000002": 40_000_000, "val_000000": 40_000_000}.items():
        found = draws.integers(0, _WORDS, count, dtype=np.uint16)
        ends = np.cumsum(draws.integers(50, _LONGEST, count // 50))
        found[0] = found[ends[ends < count]] = _WORDS
        header = np.zeros(256, np.int32)
        header[:3] = _MAGIC, _VERSION, count
        with (folder / f"fineweb_{name}.bin").open("wb") as file:
            file.write(header.tobytes())
            file.write(found.tobytes())


def text(file: Path) -> None:
    """Write a text of a million characters, of which 65 differ."""
    file.parent.mkdir(parents=True, exist_ok=True)
    characters = np.frombuffer(f"{string.ascii_letters} \n.,;:!?'-&3$".encode(), np.uint8)
    file.write_bytes(np.random.default_rng(0).choice(characters, 1_000_000).tobytes())
