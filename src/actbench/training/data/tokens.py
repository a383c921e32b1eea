"""What makes tokens of written sentences: the ``tokenizer.json`` of a model, read by the library ``tokenizers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.results.runs import TrainingCase
from actbench.workloads import folder, names, presets

FILE_NAME = "tokenizer.json"
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


@dataclass(frozen=True)
class Tokens:
    """Sentences as a model is shown them.

    Attributes:
        ids: ``(n, length)`` int64.
        beside: ``attention_mask (n, length)`` int64, 1 where no padding stands, and ``token_type_ids`` where two
            sentences are told apart.
        vocabulary: How many tokens there are.
    """

    ids: Tensor
    beside: dict[str, Tensor]
    vocabulary: int


class Tokenizer:
    """Makes tokens of sentences, cut or padded to one length.

    Args:
        file: A ``tokenizer.json``.

    Raises:
        UsageError: It cannot be read.
    """

    def __init__(self, file: Path) -> None:
        import tokenizers

        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"{file} is no tokenizer of the library tokenizers: {error}") from None
        known = [token for token in _PADDING if self._tokenizer.token_to_id(token) is not None]
        given = self._tokenizer.padding or {}
        token = given.get("pad_token") or (known[0] if known else None)
        if token is None:
            raise UsageError(f"{file} has no padding token: none of {', '.join(_PADDING)} is in it")
        self._pad = {"pad_token": token, "pad_id": self._tokenizer.token_to_id(token)}

    def __call__(self, sentences: Sequence[Sequence[str]], length: int) -> Tokens:
        """Return samples of one or two sentences each as tokens.

        Args:
            sentences: For each sample its sentences, one or two.
            length: Tokens of a sample.
        """
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length, **self._pad)
        rows = [parts[0] if len(parts) == 1 else tuple(parts) for parts in sentences]
        encoded = self._tokenizer.encode_batch(rows)
        types = torch.tensor([one.type_ids for one in encoded])
        beside = {"attention_mask": torch.tensor([one.attention_mask for one in encoded])}
        if bool(types.any()):
            beside["token_type_ids"] = types
        ids = torch.tensor([one.ids for one in encoded])
        return Tokens(ids, beside, self._tokenizer.get_vocab_size())


def tokenizer_file(case: TrainingCase) -> Path:
    """Return the file of what makes tokens for the model of a run: what the recipe names, or the model's own.

    Raises:
        UsageError: There is none, or it cannot be had.
    """
    if case.tokenizer is not None:
        folder = Path(case.tokenizer).expanduser()
        return _in_folder(folder, case) if folder.is_dir() else _on_hub((case.tokenizer,), case)
    name = names.parse(case.model)
    if name.kind not in ("folder", "preset", "hub"):
        raise UsageError(f"{case.model} has no tokenizer of its own: write tokenizer = into the recipe")
    if name.kind == "folder":
        return _in_folder(Path(name.name), case)
    repositories = presets.presets()[name.name].hub if name.kind == "preset" else (name.name,)
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
            problem = (str(error) or type(error).__name__).splitlines()[0]
    raise UsageError(
        f"{case.data} needs the {FILE_NAME} of {repositories[0]}: {problem}; write tokenizer = into the recipe, with a "
        "folder that holds one"
    )
