from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from actbench.errors import UsageError
from actbench.tools.train import data
from actbench.tools.train.data import sentences
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.records import TrainingCase

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "good", "bad", "film", "story", "is", "not"]
TEXTS = ["a good film", "a bad story", "a film is not bad", "is a story not good"]

SCORES = {"sst2": "accuracy", "mrpc": "f1", "rte": "accuracy", "stsb": "correlation", "imdb": "accuracy"}

Write = Callable[..., Path]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write a tokenizer of words, with BERT's marks and types, and return its folder."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes the splits of a data set, in the form of the hub's files, and return their folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("ACTBENCH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sentences._loaded.cache_clear()

    def write(name: str, form: str = "parquet", rows: int = 16, **changes: Any) -> Path:
        task, folder = sentences.TASKS[name], tmp_path / "data" / name
        folder.mkdir(parents=True)
        columns: dict[str, Any] = {
            column: [TEXTS[(row + place) % 4] for row in range(rows)] for place, column in enumerate(task.columns)
        }
        columns["label"] = (
            [row % 2 + 0.5 for row in range(rows)] if name == "stsb" else [row % 2 for row in range(rows)]
        )
        frame = pandas.DataFrame({**columns, "idx": range(rows), **changes})
        for split in ("train", task.held_back):
            if form == "parquet":
                frame.to_parquet(folder / f"{split}-00000-of-00001.parquet")
            elif form == "csv":
                frame.to_csv(folder / f"{split}.csv", index=False)
            elif form == "jsonl":
                frame.to_json(folder / f"{split}.jsonl", orient="records", lines=True)
        if form == "disk":
            split = datasets.Dataset.from_pandas(frame)
            datasets.DatasetDict({"train": split, task.held_back: split}).save_to_disk(str(folder))
        return folder

    return write


def case(name: str, tokenizer: Path, **fields: Any) -> TrainingCase:
    labels = 1 if name == "stsb" else 2
    sizes = "num_hidden_layers=1,hidden_size=16,intermediate_size=16,num_attention_heads=2"
    model = f"tiny-bert@{sizes},num_labels={labels}"
    usual: dict[str, Any] = {"batch_size": 4, "steps": 2, "learning_rate": 1e-3, "sequence_length": 12}
    return TrainingCase(**{"model": model, "data": name, "tokenizer": str(tokenizer), **usual, **fields})


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl", "disk"])
def test_sentences_are_read_in_any_form(write: Write, tokenizer: Path, form: str) -> None:
    write("sst2", form)

    found = data.load(case("sst2", tokenizer), 8)

    expected = [1, *(WORDS.index(word) for word in TEXTS[0].split()), 2, 3, 3, 3]
    assert found.train.inputs[0].tolist() == expected
    assert found.train.beside["attention_mask"][0].tolist() == [1] * 5 + [0] * 3
    assert "token_type_ids" not in found.train.beside
    assert found.train.labels.tolist() == [0, 1] * 8
    assert (found.classes, found.vocabulary, found.metric) == (2, len(WORDS), "accuracy")


def test_two_sentences_are_told_apart_and_cut_to_their_length(write: Write, tokenizer: Path) -> None:
    write("mrpc")

    found = data.load(case("mrpc", tokenizer), 9)

    first, second = TEXTS[0].split(), TEXTS[1].split()
    ids = [1, *map(WORDS.index, first), 2, *map(WORDS.index, second), 2]
    assert found.train.inputs[0].tolist() == ids
    assert found.train.beside["token_type_ids"][0].tolist() == [0] * 5 + [1] * 4
    assert found.train.inputs.shape == (16, 9)
    assert int(found.train.beside["attention_mask"][2].sum()) == 9  # 5 and 5 words, cut


@pytest.mark.parametrize(
    ("name", "metric"),
    [pytest.param(*pair, marks=() if pair[0] == "stsb" else pytest.mark.sampled(slow=2)) for pair in SCORES.items()],
)
def test_models_are_trained_and_scored_as_each_task_says(write: Write, tokenizer: Path, name: str, metric: str) -> None:
    write(name)
    run = case(name, tokenizer, steps=30, learning_rate=1e-2)
    loop = TrainingLoop(run)
    loop.check()
    list(loop)
    found = loop.result()

    assert found.metric == metric
    assert found.losses[-1] < found.losses[0]
    assert found.final.accuracy is None if name == "stsb" else found.score > 0.6


def test_padding_changes_nothing(write: Write, tokenizer: Path) -> None:
    write("sst2")
    model = f"{case('sst2', tokenizer).model},hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    short, long = (case("sst2", tokenizer, model=model, sequence_length=length) for length in (7, 12))

    assert next(iter(TrainingLoop(short))) == pytest.approx(next(iter(TrainingLoop(long))), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sentence": None}, "no column 'sentence'"),
        ({"label": [2] * 16}, "labels from 2 to 2, not 2 classes"),
    ],
)
def test_files_that_are_no_files_of_the_task_are_refused(
    write: Write, tokenizer: Path, changes: dict[str, Any], told: str
) -> None:
    folder = write("sst2", "csv", **{key: value for key, value in changes.items() if value})
    if None in changes.values():
        for file in folder.iterdir():
            file.write_text(file.read_text().replace("sentence", "text"))

    with pytest.raises(UsageError, match=told):
        data.load(case("sst2", tokenizer), 8)


def test_a_missing_split_and_a_broken_file_are_told(write: Write, tokenizer: Path) -> None:
    folder = write("rte")
    (folder / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(UsageError, match="no split 'validation'; it has train"):
        data.load(case("rte", tokenizer), 8)

    (folder / "train-00000-of-00001.parquet").write_bytes(b"broken")
    with pytest.raises(UsageError, match="cannot be read from"):
        data.load(case("rte", tokenizer), 8)


def test_without_the_library_it_says_what_to_install(
    write: Write, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)

    with pytest.raises(UsageError, match="pip install datasets"):
        data.load(case("sst2", tokenizer), 8)


def test_without_network_and_files_it_says_where_to_put_them(
    write: Write, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sentences.folder, "reachable", lambda url: False)

    with pytest.raises(UsageError, match=r"cannot be fetched and is not at .*sst2.* ACTBENCH_DATA"):
        data.load(case("sst2", tokenizer), 8)


def test_a_tokenizer_is_looked_for_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences.folder, "reachable", lambda url: False)
    usual: dict[str, Any] = {"data": "sst2", "batch_size": 4, "steps": 2, "learning_rate": 1e-3}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({}))

    assert sentences.tokenizer_file(TrainingCase(model=str(folder), **usual)) == folder / "tokenizer.json"
    with pytest.raises(UsageError, match="not a tokenizer of the library"):
        sentences.Tokenizer(folder / "tokenizer.json")
    for model in ("tiny-bert", "resnet-cifar"):
        with pytest.raises(UsageError, match="write tokenizer = into the recipe"):
            sentences.tokenizer_file(TrainingCase(model=model, **usual))
    with pytest.raises(UsageError, match=r"tokenizer.json of .*bert-base-uncased: it is not in the cache"):
        sentences.tokenizer_file(TrainingCase(model="bert-base-uncased", **usual))


def test_ratings_need_a_model_of_one_number(write: Write, tokenizer: Path) -> None:
    write("stsb")
    two = case("stsb", tokenizer).model.replace("num_labels=1", "num_labels=2")

    with pytest.raises(UsageError, match="num_labels=1"):
        TrainingLoop(case("stsb", tokenizer, model=two))
    assert data.load(case("stsb", tokenizer), 8).train.labels.dtype == torch.float32
