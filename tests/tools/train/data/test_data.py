from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actbench.errors import UsageError
from actbench.tools.train import data
from actbench.tools.train.data import generated, pictures
from actbench.tools.train.records import TrainingCase


def loaded(name: str, length: int) -> data.DataSet:
    return data.load(TrainingCase(model="any", data=name, batch_size=1, steps=1, learning_rate=0.1), length)


def test_digits_are_split_once_and_for_all() -> None:
    first, again = pictures.load_digits(), pictures.load_digits()

    assert first.train.inputs.shape == (1797 - 360, 1, 8, 8)
    assert first.validation.inputs.shape == (360, 1, 8, 8)
    assert torch.equal(first.validation.labels, again.validation.labels)
    assert set(first.validation.labels.tolist()) == set(range(10))
    assert first.train.inputs.mean().abs() < 1e-5


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)

    with pytest.raises(UsageError, match="pip install scikit-learn"):
        pictures.load_digits()


def test_the_grammar_is_deterministic_and_keeps_its_rules() -> None:
    written = generated.written(20_000, seed=3)
    sentences = written.split(". ")[:-1]
    sums = [words for sentence in sentences if len(words := sentence.split()) == 5 and words[3] == "make"]

    assert written == generated.written(20_000, seed=3)
    assert written != generated.written(20_000, seed=4)
    assert set(written) <= set(generated.ALPHABET)
    assert len(sums) > 20
    for first, _, second, _, result in sums:
        assert generated._NUMBERS.index(first) + generated._NUMBERS.index(second) == generated._NUMBERS.index(result)
    simple = [words for s in sentences if "that" not in s and (words := s.split())[0] == "every"]
    assert simple
    assert all(any(w.endswith("s") for w in words[2:4]) for words in simple)


def test_text_comes_in_windows_whose_labels_are_themselves() -> None:
    found = generated.load_text(50)

    assert found.train.inputs.shape == (generated.TRAIN_LETTERS // 50, 50)
    assert torch.equal(found.train.inputs, found.train.labels)
    assert found.vocabulary == len(generated.ALPHABET)


def test_the_label_of_a_review_is_what_its_clauses_say() -> None:
    found = generated.load_reviews(24)
    worth = dict.fromkeys(generated._GOOD, 1) | dict.fromkeys(generated._BAD, -1)
    for ids, label in list(zip(found.train.inputs, found.train.labels, strict=True))[:200]:
        score = 0
        for clause in " ".join(generated.WORDS[i] for i in ids).split("."):
            words = clause.split()
            factor = 2 if "very" in words else 1
            score += sum(worth.get(word, 0) for word in words) * factor
        assert (score > 0) == bool(label)
        assert score != 0
    assert 0.4 < found.validation.labels.float().mean() < 0.6


@pytest.mark.parametrize(("classes", "label_bytes"), [(10, 1), (100, 2)])
def test_cifar_is_read_from_its_binary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: int, label_bytes: int
) -> None:
    folder, train, test = pictures._FILES[classes]
    (tmp_path / folder).mkdir()
    monkeypatch.setenv("ACTBENCH_DATA", str(tmp_path))
    rows = np.random.default_rng(0).integers(0, 256, (4, label_bytes + 3072)).astype(np.uint8)
    rows[:, :label_bytes] = [[7]] * 4 if label_bytes == 1 else [[19, 99]] * 4
    for file in (*train, *test):
        rows.tofile(tmp_path / folder / file)

    found = loaded(f"cifar{classes}", 0)

    assert found.train.labels.tolist() == [7 if classes == 10 else 99] * (4 * len(train))
    assert found.train.inputs.shape == (4 * len(train), 3, 32, 32)
    raw = torch.from_numpy(rows[:, label_bytes:]).view(4, 3, 32, 32).float() / 255
    whole = raw.repeat(len(train), 1, 1, 1)
    expected = (raw - whole.mean((0, 2, 3), keepdim=True)) / whole.std((0, 2, 3), keepdim=True)
    torch.testing.assert_close(found.validation.inputs, expected)


def test_files_that_are_not_cifars_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, train, test = pictures._FILES[10]
    (tmp_path / folder).mkdir()
    monkeypatch.setenv("ACTBENCH_DATA", str(tmp_path))
    with pytest.raises(UsageError, match=r"data_batch_1.bin cannot be read"):
        loaded("cifar10", 0)
    for file in (*train, *test):
        (tmp_path / folder / file).write_bytes(b"x" * 100)
    with pytest.raises(UsageError, match="no multiple of 3073"):
        loaded("cifar10", 0)


def test_moving_and_mirroring_keeps_the_pixels_inside() -> None:
    images = torch.arange(1, 1 + 64 * 3 * 8 * 8).float().view(64, 3, 8, 8)
    moved = pictures.moved_and_mirrored(images, torch.Generator().manual_seed(0))

    assert moved.shape == images.shape
    for before, after in zip(images, moved, strict=True):
        assert set(after.unique().tolist()) - {0.0} <= set(before.unique().tolist())
    again = pictures.moved_and_mirrored(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, pictures.moved_and_mirrored(images, torch.Generator().manual_seed(1)))


def test_an_unknown_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'digits'"):
        loaded("digit", 0)
    with pytest.raises(UsageError, match="16 words at least"):
        loaded("reviews", 8)
