"""Tasks of GLUE (Wang et al. 2018, arXiv 1804.07461) and IMDB's reviews (Maas et al. 2011), read by ``datasets``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor

from actbench.errors import UsageError, first_line
from actbench.tools.train.data import DataSet, Samples
from actbench.tools.train.data.pictures import FOLDER_VARIABLE, data_folder
from actbench.tools.train.records import Metric, TrainingCase
from actbench.workload import folder, names

FILE_NAME = "tokenizer.json"
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


class Tokenizer:
    """Makes tokens of sentences, cut or padded to one length, by a ``tokenizer.json``; a UsageError if it is none."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"{file} is not a tokenizer of the library tokenizers: {error}") from None
        known = [token for token in _PADDING if self._tokenizer.token_to_id(token) is not None]
        given = self._tokenizer.padding or {}
        token = given.get("pad_token") or (known[0] if known else None)
        if token is None:
            raise UsageError(f"{file} has no padding token: none of {', '.join(_PADDING)} is in it")
        self._pad = {"pad_token": token, "pad_id": self._tokenizer.token_to_id(token)}

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def __call__(self, sentences: Sequence[Sequence[str]], length: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return samples of one or two sentences each as ``length`` tokens.

        Returns:
            Ids ``(n, length)`` int64; and ``attention_mask (n, length)`` int64, 0 at padding, with ``token_type_ids``
            where samples have two sentences.
        """
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length, **self._pad)
        rows = [parts[0] if len(parts) == 1 else tuple(parts) for parts in sentences]
        encoded = self._tokenizer.encode_batch(rows)
        types = torch.tensor([one.type_ids for one in encoded])
        beside = {"attention_mask": torch.tensor([one.attention_mask for one in encoded])}
        if bool(types.any()):
            beside["token_type_ids"] = types
        return torch.tensor([one.ids for one in encoded]), beside


def tokenizer_file(case: TrainingCase) -> Path:
    """Return the tokenizer file of a run: what the recipe names, or the model's own; a UsageError if there is none."""
    if case.tokenizer is not None:
        folder = Path(case.tokenizer).expanduser()
        return _in_folder(folder, case) if folder.is_dir() else _on_hub((case.tokenizer,), case)
    name = names.parse_model_name(case.model)
    if name.kind not in ("folder", "preset", "hub"):
        raise UsageError(f"{case.model} has no tokenizer of its own: write tokenizer = into the recipe")
    if name.kind == "folder":
        return _in_folder(Path(name.name), case)
    repositories = names.presets()[name.name].hub if name.kind == "preset" else (name.name,)
    if not repositories:
        raise UsageError(
            f"{case.model} has no tokenizer of its own, which {case.data} needs: write tokenizer = into the recipe, "
            f"with a folder that holds a {FILE_NAME} or a model of the hub"
        )
    return _on_hub(repositories, case)


def _in_folder(folder: Path, case: TrainingCase) -> Path:
    file = folder / FILE_NAME
    if not file.is_file():
        raise UsageError(f"{folder} holds no {FILE_NAME}, which {case.data} needs; write tokenizer = into the recipe")
    return file


def _on_hub(repositories: Sequence[str], case: TrainingCase) -> Path:
    for repository in repositories:
        path = huggingface_hub.try_to_load_from_cache(repository, FILE_NAME)
        if isinstance(path, str):
            return Path(path)
    problem = "it is not in the cache, and the hub does not answer"
    if not folder.offline() and folder.reachable(huggingface_hub.constants.ENDPOINT):
        try:
            return Path(huggingface_hub.hf_hub_download(repositories[0], FILE_NAME))
        except Exception as error:  # which network library the hub stands on differs between its versions
            problem = first_line(error)
    raise UsageError(
        f"{case.data} needs the {FILE_NAME} of {repositories[0]}: {problem}; write tokenizer = into the recipe, with a "
        "folder that holds one"
    )


@dataclass(frozen=True)
class Task:
    """Where a data set is, and what it looks like.

    Attributes:
        repository: Its name on the hub.
        part: Which of its parts, where it has several.
        columns: Those of a sample's sentences.
        classes: 1 where labels are ratings.
        metric: As GLUE scores it.
        held_back: The split to evaluate on; GLUE does not publish the labels of its test split.
    """

    repository: str
    part: str | None
    columns: tuple[str, ...]
    classes: int = 2
    metric: Metric = "accuracy"
    held_back: str = "validation"


_GLUE, _PAIR = "nyu-mll/glue", ("sentence1", "sentence2")
TASKS: dict[str, Task] = {
    "sst2": Task(_GLUE, "sst2", ("sentence",)),
    "mrpc": Task(_GLUE, "mrpc", _PAIR, metric="f1"),
    "rte": Task(_GLUE, "rte", _PAIR),
    "stsb": Task(_GLUE, "stsb", _PAIR, classes=1, metric="correlation"),
    "imdb": Task("stanfordnlp/imdb", None, ("text",), held_back="test"),
}


def load(case: TrainingCase, length: int) -> DataSet:
    """Return the sentences as tokens ``(n, length)`` int64, with classes (int64) or ratings (float32).

    Files are looked for in a folder of the data set's name below the one that ``ACTBENCH_DATA`` names, or the user's
    cache folder, in any form that ``datasets`` reads (parquet, csv, JSON lines, or what ``save_to_disk`` writes); else
    ``datasets`` takes its cache or the hub.

    Raises:
        UsageError: ``datasets`` is not installed, the files are not there and cannot be fetched, they are no files of
            this data set, or there is no tokenizer.
    """
    return _loaded(case.data, length, tokenizer_file(case), data_folder())


@functools.lru_cache(maxsize=1)  # the runs of a comparison share it; nothing changes its tensors
def _loaded(name: str, length: int, file: Path, folder: Path) -> DataSet:
    task, place, tokenizer = TASKS[name], folder / name, Tokenizer(file)
    found = _read(name, place)
    samples = {}
    for split in ("train", task.held_back):
        if split not in found:
            raise UsageError(f"{place}: the data set has no split {split!r}; it has {', '.join(found)}")
        samples[split] = _samples(found[split], task, length, tokenizer, f"{place}: {split}")
    return DataSet(
        name=name,
        kind="ratings" if task.classes == 1 else "sentences",
        train=samples["train"],
        validation=samples[task.held_back],
        classes=task.classes,
        vocabulary=tokenizer.vocabulary,
        metric=task.metric,
    )


def _samples(split: Any, task: Task, length: int, tokenizer: Tokenizer, place: str) -> Samples:
    missing = [column for column in (*task.columns, "label") if column not in split.column_names]
    if missing:
        raise UsageError(f"{place} has no column {missing[0]!r}; it has {', '.join(split.column_names)}")
    sentences = list(zip(*(split[column] for column in task.columns), strict=True))
    ids, beside = tokenizer(sentences, length)
    labels = torch.tensor(list(split["label"]))
    if task.classes > 1 and not (int(labels.min()) >= 0 and int(labels.max()) < task.classes):
        raise UsageError(
            f"{place} has labels from {int(labels.min())} to {int(labels.max())}, not {task.classes} classes"
        )
    labels = labels.float() if task.classes == 1 else labels.long()
    return Samples(ids, labels, beside)


def _read(name: str, place: Path) -> Any:
    """Return the splits by name."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(
            f"the data set {name} is read by the library datasets: install it, 'pip install datasets'"
        ) from None
    try:
        with _silent(library):
            return _from_folder(library, place) if place.is_dir() else _from_hub(library, TASKS[name])
    except Exception as error:  # what the library raises differs between its versions
        problem = first_line(error)
        found = "cannot be read from" if place.is_dir() else "cannot be fetched and is not at"
        raise UsageError(
            f"the data set {name} {found} {place}: {problem}; put train.* and {TASKS[name].held_back}.* there, in "
            f"parquet, csv or jsonl, or name the folder above it in {FOLDER_VARIABLE}"
        ) from None


def _from_folder(library: Any, place: Path) -> Any:
    if (place / "dataset_dict.json").exists():
        return library.load_from_disk(str(place))
    return library.load_dataset(str(place))


def _from_hub(library: Any, task: Task) -> Any:
    before = library.config.HF_HUB_OFFLINE
    # Without an answer it would ask again and again, for minutes, before it looks into its cache.
    library.config.HF_HUB_OFFLINE = before or not folder.reachable(huggingface_hub.constants.ENDPOINT)
    try:
        return library.load_dataset(task.repository, task.part)
    finally:
        library.config.HF_HUB_OFFLINE = before


@contextmanager
def _silent(library: Any) -> Iterator[None]:
    """Keep the library from logging and drawing bars."""
    level, bars = library.logging.get_verbosity(), not library.are_progress_bars_disabled()
    library.logging.set_verbosity_error()
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()
