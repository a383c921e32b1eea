"""Configs whose architectures say nothing, too much, or what cannot be built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.workload.huggingface import HuggingFaceWorkload

Write = Callable[..., Path]


def load(folder: Path, **options: object) -> HuggingFaceWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": str(folder), "batch_size": 2, **options}))
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


@pytest.mark.sampled(fast=5, slow=5)
@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        ("BertForMaskedLM", "architectures is not a list of class names"),
        ([["BertForMaskedLM"]], "architectures is not a list of class names"),
        ({"BertForMaskedLM": 1}, "architectures is not a list of class names"),
        ([None], "architectures is not a list of class names"),
        (["BertForNothing"], "'BertForNothing', a class that transformers .* lacks; say what to train: --task"),
        (["__class__"], "'__class__', a class that transformers .* lacks"),
        (["__dict__"], "a class that transformers .* lacks"),
        (["models"], "'models', a class that transformers .* lacks"),
        (["BertTokenizer"], "a class that transformers .* lacks"),
        (["os.system"], "a class that transformers .* lacks"),
        (["A" * 10_000], "'A{80}…', a class"),
        (["GPT2LMHeadModel"], r"'GPT2LMHeadModel', which is not a class for its model_type, 'bert'"),
        (["BertModel"], r"BertModel.*no head and so no loss.*--task sequence-classification \(BertForSequence"),
        (["BertForMaskedLM", "BertForPreTraining"], "several classes, 'BertForMaskedLM', 'BertForPreTraining'; say"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_to_do(
    architectures: object, words: str, write_config: Write
) -> None:
    folder = write_config("BertModel", architectures=architectures)

    with pytest.raises(ModelError, match=words) as caught:
        load(folder)

    assert len(str(caught.value)) < 1000


def test_an_explicit_task_overrides_what_the_config_names(write_config: Write) -> None:
    base = load(write_config("BertModel"), task="masked-lm")
    whisper = load(write_config("WhisperForConditionalGeneration"), task="audio-classification")

    for workload, name in ((base, "BertForMaskedLM"), (whisper, "WhisperForAudioClassification")):
        assert type(workload.setup(materialize=False, seed=0).module).__name__ == name


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("BertModel", "BertForSequenceClassification, for sequence-classification"),
        ("WhisperModel", "WhisperForConditionalGeneration, for speech-seq2seq"),
        ("CLIPModel", "CLIPModel, for image-text-contrastive"),
    ],
)
@pytest.mark.parametrize("missing", [None, []])
def test_a_config_that_names_no_class_is_guessed_aloud(
    name: str, built: str, missing: object, write_config: Write
) -> None:
    workload = load(write_config(name, architectures=missing))
    workload.setup(materialize=False, seed=0)

    assert f"names no architectures: it is built as {built}; --task takes" in workload.warnings[0]


def test_a_model_that_could_see_is_given_text_alone_only_when_asked(write_config: Write) -> None:
    folder = write_config("Gemma3nForConditionalGeneration")

    with pytest.raises(ModelError, match=r"Gemma3nForConditionalGeneration, .*cannot make batches.*causal-lm as well"):
        load(folder)
    assert "Gemma3nForConditionalGeneration is given no pixel_values" in load(folder, task="causal-lm").warnings[0]


@pytest.mark.parametrize(
    "name",
    [
        "LlavaNextForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Wav2Vec2ForPreTraining",
        "CLIPTextModelWithProjection",
    ],
)
def test_a_class_that_cannot_be_fed_is_refused_by_its_name(name: str, write_config: Write) -> None:
    with pytest.raises(ModelError, match=rf"{name}.*(cannot make batches|not a class for its model_type)"):
        load(write_config(name))


def test_a_sequence_that_ctc_cannot_spell_is_refused(write_config: Write) -> None:
    folder = write_config("Wav2Vec2ForCTC")

    with pytest.raises(ModelError, match=r"--sequence-length 40: .* of 10 s of audio, enough .* to spell 31 tokens"):
        load(folder, sequence_length=40)


def test_code_of_its_own_is_named_where_the_class_is_not_of_transformers(write_config: Write) -> None:
    folder = write_config("BertModel", architectures=["MyModel"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForMaskedLM": "my.MyModel"}}))

    with pytest.raises(ModelError, match=r"'MyModel'.*--trust-remote-code runs it"):
        load(folder)
