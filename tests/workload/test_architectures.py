"""The class that a config names is what is built, fed and trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError, UntraceableError
from actbench.measuring.bench import measure
from actbench.model.records import Built, Case
from actbench.simulator.fake import fake_mode, to_fake
from actbench.workload.huggingface import HuggingFaceWorkload

# Of each class: its task, and what of its parameters no step reaches.
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "WhisperForConditionalGeneration": ("speech-seq2seq", ("model.encoder.embed_positions",)),
    "Speech2TextForConditionalGeneration": ("speech-seq2seq", ()),
    "Wav2Vec2ForCTC": ("ctc", ("wav2vec2.masked_spec_embed",)),
    "SegformerForSemanticSegmentation": ("semantic-segmentation", ()),
    "CLIPModel": ("image-text-contrastive", ()),
    "YolosForObjectDetection": ("object-detection", ()),
    "DetrForObjectDetection": ("object-detection", ("model.backbone",)),  # transformers freezes it
    "DPTForDepthEstimation": ("depth-estimation", ("dpt.layernorm", "neck.fusion_stage.layers.0")),
    "T5ForConditionalGeneration": ("seq2seq-lm", ()),
    "BlipForConditionalGeneration": ("image-text-to-text", ()),
    "DebertaV2ForSequenceClassification": ("sequence-classification", ()),
}
# Further heads: their task, and the shape of each label of a batch of two.
HEADS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "BertForMaskedLM": ("masked-lm", {"labels": (2, 24)}),
    "BertLMHeadModel": ("causal-lm", {"labels": (2, 24)}),
    "BertForTokenClassification": ("token-classification", {"labels": (2, 24)}),
    "BertForQuestionAnswering": ("question-answering", {"start_positions": (2,), "end_positions": (2,)}),
    "BertForMultipleChoice": ("multiple-choice", {"labels": (2,)}),
    "BertForNextSentencePrediction": ("next-sentence-prediction", {"labels": (2,)}),
    "BertForPreTraining": ("pretraining", {"labels": (2, 24), "next_sentence_label": (2,)}),
    "ElectraForPreTraining": ("pretraining", {"labels": (2, 24)}),
    "ViTForMaskedImageModeling": ("masked-image-modeling", {"bool_masked_pos": (2, 16)}),
    "WhisperForAudioClassification": ("audio-classification", {"labels": (2,)}),
}

Write = Callable[..., Path]


def load(model: str | Path, **options: object) -> HuggingFaceWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": str(model), "batch_size": 2, **options}))
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


def without_gradient(module: torch.nn.Module) -> list[str]:
    return [path for path, value in module.named_parameters() if value.grad is None]


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("name", CLASSES)
def test_the_named_class_trains_for_real_and_on_fake_tensors(name: str, write_config: Write) -> None:
    task, unreached = CLASSES[name]
    workload = load(write_config(name))
    real, fake = (workload.setup(materialize=materialize, seed=0) for materialize in (True, False))
    assert real.loss is not None
    real.loss(real.module, workload.batch(2, seed=0)).backward()

    assert type(real.module).__name__ == name
    assert real.built is not None
    assert (real.built.model_class, real.built.task) == (name, task)
    missed = without_gradient(real.module)
    assert [path for path in missed if not path.startswith(unreached)] == []

    assert fake.loss is not None
    mode = fake_mode()
    to_fake(fake.module, mode).train()
    with mode:
        fake.loss(fake.module, workload.batch(2, seed=0)).backward()
    assert without_gradient(fake.module) == missed


@pytest.mark.parametrize("name", HEADS)
def test_each_head_gets_the_labels_of_its_task(name: str, write_config: Write) -> None:
    task, labels = HEADS[name]
    workload = load(write_config(name))
    setup, batch = workload.setup(materialize=True, seed=0), workload.batch(2, seed=0)
    assert setup.loss is not None
    setup.loss(setup.module, batch).backward()

    assert (type(setup.module).__name__, workload.task) == (name, task)
    assert {key: tuple(batch[key].shape) for key in labels} == labels
    assert without_gradient(setup.module) in ([], ["encoder.embed_positions.weight"])


@pytest.mark.slow
def test_a_whisper_is_measured_with_its_encoder(write_config: Write) -> None:
    folder = str(write_config("WhisperForConditionalGeneration", max_source_positions=200))
    whole, decoder = (measure(Case(model=folder, task=task, batch_size=2)) for task in ("auto", "causal-lm"))

    assert whole.activation_bytes > 3 * decoder.activation_bytes
    assert whole.built == Built(
        model_class="WhisperForConditionalGeneration",
        task="speech-seq2seq",
        sequence_length=24,
        audio_shape=(8, 400),
    )
    assert decoder.built is not None
    assert decoder.built.model_class == "WhisperForCausalLM"


@pytest.mark.exhaustive
def test_a_detection_is_simulated_with_the_bytes_it_takes(write_config: Write) -> None:
    case = Case(model=str(write_config("YolosForObjectDetection")), batch_size=2, min_steps=1, min_seconds=0)
    real = measure(case.model_copy(update={"meter": "cpu", "warmup_steps": 0}))
    simulated = measure(case.model_copy(update={"device_profile": "cpu"}))

    assert simulated.activation_bytes == pytest.approx(real.activation_bytes, rel=1e-3)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=2e-3)


def test_no_layer_is_left_to_chance_and_the_config_stays_as_it_was(write_config: Write) -> None:
    workload = load(write_config("Wav2Vec2ForCTC"))
    setup = workload.setup(materialize=True, seed=0)
    assert setup.loss is not None
    ran = [0]
    for layer in setup.module.wav2vec2.encoder.layers:
        layer.register_forward_hook(lambda *_: ran.append(ran.pop() + 1))
    for _ in range(4):
        setup.loss(setup.module, workload.batch(1, seed=0))

    assert ran == [4 * len(setup.module.wav2vec2.encoder.layers)]
    assert setup.module.config.layerdrop == 0.5
    assert setup.module.config.apply_spec_augment
    assert "trained without LayerDrop and SpecAugment" in workload.warnings[0]


def test_an_image_size_counts_where_the_config_has_none_or_has_it_inside(write_config: Write) -> None:
    segformer = load(write_config("SegformerForSemanticSegmentation"), image_size=64)
    clip = load(write_config("CLIPModel"), image_size=48)
    yolos = load(write_config("YolosForObjectDetection"))

    assert segformer.batch(2, seed=0)["labels"].shape == (2, 64, 64)
    assert clip.batch(2, seed=0)["pixel_values"].shape == (2, 3, 48, 48)
    assert yolos.batch(2, seed=0)["pixel_values"].shape == (2, 3, 32, 48)
    setup = clip.setup(materialize=True, seed=0)
    assert setup.loss is not None
    setup.loss(setup.module, clip.batch(2, seed=0))


def test_a_loss_of_ours_is_said_to_be_ours(write_config: Write) -> None:
    workload = load(write_config("DPTForDepthEstimation"))
    workload.setup(materialize=False, seed=0)

    assert "computes no loss: it is the mean absolute error" in workload.warnings[0]


def test_a_class_that_looks_at_values_names_itself_and_what_to_do(write_config: Write) -> None:
    folder = write_config("GLPNForDepthEstimation")

    with pytest.raises(UntraceableError, match=r"GLPNForDepthEstimation for depth-estimation looks .*--meter cpu"):
        measure(Case(model=str(folder), batch_size=1, image_size=64))


def test_wide_images_are_refused_by_a_model_of_square_ones(write_config: Write) -> None:
    clip = load(write_config("CLIPModel"), image_size="32x48")

    with pytest.raises(ModelError, match=r"^--image-size 32x48: this model takes square images only$"):
        clip.setup(materialize=False, seed=0)
