"""Sentences of a small grammar, letter by letter, for language models.

There is something to learn at every distance: how words are spelled, which word may follow which, verbs that agree with
a subject that stands before a relative clause, and sums that are right.
"""

from __future__ import annotations

import functools
from random import Random

import torch

from actbench.training.data.samples import DataSet, Samples

ALPHABET = " abcdefghijklmnopqrstuvwxyz."
TRAIN_LETTERS, VALIDATION_LETTERS = 400_000, 20_000
_NOUNS = [
    "dog",
    "cat",
    "bird",
    "child",
    "doctor",
    "farmer",
    "singer",
    "teacher",
    "river",
    "stone",
    "ship",
    "cloud",
    "neighbour",
    "painter",
]
_VERBS = ["see", "hear", "follow", "chase", "help", "greet", "like", "paint", "remember", "find"]
_ALONE = ["sleep", "wait", "sing", "fall", "move", "shine", "wander", "rest"]
_ADJECTIVES = ["old", "young", "small", "bright", "quiet", "clever", "green", "heavy"]
_PLACES = ["near the sea", "in the garden", "behind the house", "on the hill", "under the bridge"]
_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
]


@functools.lru_cache(maxsize=1)  # the runs of a comparison share it; nothing changes its tensors
def load(length: int) -> DataSet:
    """Return windows of ``length`` letters, ``(n, length)`` int64; the letters are those of ``ALPHABET``."""
    return DataSet(
        name="text",
        kind="language",
        train=_windows(written(TRAIN_LETTERS, seed=1), length),
        validation=_windows(written(VALIDATION_LETTERS, seed=2), length),
        classes=len(ALPHABET),
        vocabulary=len(ALPHABET),
        metric="loss",
    )


def written(letters: int, seed: int) -> str:
    """Write sentences until there are so many letters."""
    random = Random(seed)
    parts: list[str] = []
    count = 0
    while count < letters:
        parts.append(_sentence(random) + ". ")
        count += len(parts[-1])
    return "".join(parts)[:letters]


def _sentence(random: Random) -> str:
    if random.random() < 0.2:
        first, second = random.randrange(8), random.randrange(7)
        return f"{_NUMBERS[first]} and {_NUMBERS[second]} make {_NUMBERS[first + second]}"
    plural = random.random() < 0.5
    text = f"{_subject(random, plural, depth=0)} {_predicate(random, plural)}"
    if random.random() < 0.2:
        text += f" and {_predicate(random, plural)}"
    return text if random.random() < 0.6 else f"{text} {random.choice(_PLACES)}"


def _subject(random: Random, plural: bool, depth: int) -> str:
    noun = random.choice(_NOUNS)
    if plural:
        noun = "children" if noun == "child" else f"{noun}s"
    adjective = f"{random.choice(_ADJECTIVES)} " if random.random() < 0.3 else ""
    article = random.choice(("the", "some", "many") if plural else ("the", "a", "every"))
    if article == "a" and (adjective or noun)[0] in "aeiou":
        article = "an"
    text = f"{article} {adjective}{noun}"
    if depth < 2 and random.random() < 0.3:
        other = random.random() < 0.5
        verb = random.choice(_VERBS)
        text += f" that {_subject(random, other, depth + 1)} {_agreeing(verb, other)}"
    return text


def _predicate(random: Random, plural: bool) -> str:
    if random.random() < 0.4:
        return _agreeing(random.choice(_ALONE), plural)
    return f"{_agreeing(random.choice(_VERBS), plural)} {_subject(random, random.random() < 0.5, depth=1)}"


def _agreeing(verb: str, plural: bool) -> str:
    return verb if plural else f"{verb}s"


def _windows(text: str, length: int) -> Samples:
    places = {letter: place for place, letter in enumerate(ALPHABET)}
    ids = torch.tensor([places[letter] for letter in text])
    ids = ids[: len(ids) // length * length].view(-1, length)
    return Samples(ids, ids)
