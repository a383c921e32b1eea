"""Generated text: sentences of a small grammar, letter by letter, and reviews to classify, word by word.

The text has something to learn at every distance: spelling, word order, verbs that agree with a subject before a
relative clause, and correct sums. A review is good if it praises more than it blames; opinions count double after
``very``, so that counting words decides most reviews but not all.
"""

from __future__ import annotations

import functools
from random import Random

import torch

from actbench.errors import UsageError
from actbench.tools.train.data import DataSet, Samples

ALPHABET = " abcdefghijklmnopqrstuvwxyz."
TRAIN_LETTERS, VALIDATION_LETTERS = 400_000, 20_000
_NOUNS = [
    *("dog", "cat", "bird", "child", "doctor", "farmer", "singer"),
    *("teacher", "river", "stone", "ship", "cloud", "neighbour", "painter"),
]
_VERBS = ["see", "hear", "follow", "chase", "help", "greet", "like", "paint", "remember", "find"]
_ALONE = ["sleep", "wait", "sing", "fall", "move", "shine", "wander", "rest"]
_ADJECTIVES = ["old", "young", "small", "bright", "quiet", "clever", "green", "heavy"]
_PLACES = ["near the sea", "in the garden", "behind the house", "on the hill", "under the bridge"]
_NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven"),
    *("eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen"),
]


@functools.lru_cache(maxsize=1)  # the runs of a comparison share it; nothing changes its tensors
def load_text(length: int) -> DataSet:
    """Return windows of ``length`` letters of ``ALPHABET``, ``(n, length)`` int64."""
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
    """Write sentences of so many letters in all."""
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


TRAIN_REVIEWS, VALIDATION_REVIEWS = 8192, 1024
SHORTEST = 16
_GOOD = ["good", "great", "lovely", "warm", "funny", "bright", "moving", "fresh", "clever", "brave", "gentle", "rich"]
_BAD = ["bad", "dull", "awful", "cold", "boring", "weak", "silly", "stale", "clumsy", "timid", "harsh", "poor"]
_THINGS = ["plot", "cast", "music", "ending", "script", "pace", "sound", "light", "joke", "scene", "camera", "story"]
_FILLERS = ["well", "anyway", "so", "then", "and", "still", "there", "here"]
_VERY, _QUITE = "very", "quite"
_OTHERS = ["the", "was", ".", _VERY, _QUITE]
WORDS = ["[pad]", *_OTHERS, *_GOOD, *_BAD, *_THINGS, *_FILLERS]


@functools.lru_cache(maxsize=1)  # the runs of a comparison share it; nothing changes its tensors
def load_reviews(length: int) -> DataSet:
    """Return reviews of ``length`` words as ids ``(n, length)`` int64 in ``WORDS``; label 1 is a good one.

    Raises:
        UsageError: The length has no room for a review.
    """
    if length < SHORTEST:
        raise UsageError(f"--sequence-length {length}: reviews have {SHORTEST} words at least")
    return DataSet(
        name="reviews",
        kind="sentences",
        train=_reviews(TRAIN_REVIEWS, length, seed=1),
        validation=_reviews(VALIDATION_REVIEWS, length, seed=2),
        classes=2,
        vocabulary=len(WORDS),
    )


def _reviews(count: int, length: int, seed: int) -> Samples:
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
