"""Made-up reviews to tell apart, word by word: is more of it liked than not?

Opinions count double behind ``very``, so that counting words decides most reviews, and not all: a small model learns
the former surely, in a few hundred steps, and whether it finds the latter varies from seed to seed.
"""

from __future__ import annotations

import functools
from random import Random

import torch

from actbench.errors import UsageError
from actbench.training.data.samples import DataSet, Samples

TRAIN, VALIDATION = 8192, 1024
SHORTEST = 16
_GOOD = ["good", "great", "lovely", "warm", "funny", "bright", "moving", "fresh", "clever", "brave", "gentle", "rich"]
_BAD = ["bad", "dull", "awful", "cold", "boring", "weak", "silly", "stale", "clumsy", "timid", "harsh", "poor"]
_THINGS = ["plot", "cast", "music", "ending", "script", "pace", "sound", "light", "joke", "scene", "camera", "story"]
_FILLERS = ["well", "anyway", "so", "then", "and", "still", "there", "here"]
_VERY, _QUITE = "very", "quite"
_OTHERS = ["the", "was", ".", _VERY, _QUITE]
WORDS = ["[pad]", *_OTHERS, *_GOOD, *_BAD, *_THINGS, *_FILLERS]


@functools.lru_cache(maxsize=1)  # the runs of a comparison share it; nothing changes its tensors
def load(length: int) -> DataSet:
    """Return reviews of ``length`` words as ids ``(n, length)`` int64 in ``WORDS``; label 1 is a good one.

    Raises:
        UsageError: The length has no room for a review.
    """
    if length < SHORTEST:
        raise UsageError(f"--sequence-length {length}: reviews have {SHORTEST} words at least")
    return DataSet(
        name="reviews",
        kind="sentences",
        train=_samples(TRAIN, length, seed=1),
        validation=_samples(VALIDATION, length, seed=2),
        classes=2,
        vocabulary=len(WORDS),
    )


def _samples(count: int, length: int, seed: int) -> Samples:
    random = Random(seed)
    places = {word: place for place, word in enumerate(WORDS)}
    found = [_review(random, length) for _ in range(count)]
    ids = torch.tensor([[places[word] for word in words] for words, _ in found])
    return Samples(ids, torch.tensor([int(score > 0) for _, score in found]))


def _review(random: Random, length: int) -> tuple[list[str], int]:
    """Return words and by how much the good opinions outweigh the bad ones, which is never 0."""
    while True:
        words: list[str] = []
        score = 0
        while True:
            clause, opinion = _clause(random)
            if len(words) + len(clause) > length:
                break
            words, score = words + clause, score + opinion
        if score:
            return words + random.choices(_FILLERS, k=length - len(words)), score


def _clause(random: Random) -> tuple[list[str], int]:
    liked, doubled = random.random() < 0.5, random.random() < 0.2
    degree = _VERY if doubled else _QUITE
    words = ["the", random.choice(_THINGS), "was", degree, random.choice(_GOOD if liked else _BAD), "."]
    return words, (1 if liked else -1) * (2 if doubled else 1)
