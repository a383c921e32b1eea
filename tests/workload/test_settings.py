"""Settings of batches: lengths of targets, images that are not square, segmentation, detection and masks of points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actbench import workload as workloads
from actbench.errors import ModelError, UntraceableError, UsageError
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.workload.torchvision import tasks

SAM = {
    "model_type": "sam",
    "architectures": ["SamModel"],
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
        "image_size": 128,
        "patch_size": 16,
        "output_channels": 32,
        "window_size": 4,
        "num_pos_feats": 16,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 128, "patch_size": 16},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32},
}


def of(model: str, **fields: Any) -> Case:
    return Case(model=model, gradient_quality=False, **{"batch_size": 2, "meter": "cpu", **fields})


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    batch = workloads.load_workload(case).batch(case.batch_size, seed=0)
    return {name: tuple(value.shape) for name, value in batch.items() if name != "targets"}


def both(case: Case) -> tuple[Measurement, Measurement]:
    return measure(case), measure(case.model_copy(update={"meter": "simulated", "device_profile": "cpu"}))


def agree(case: Case) -> Measurement:
    measured, simulated = both(case)
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=1e-3)
    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=1e-3)
    assert measured.built == simulated.built
    return measured


def test_a_decoder_writes_as_many_tokens_as_it_is_told_to() -> None:
    assert shapes(of("tiny-t5", sequence_length=24, target_length=5)) == {
        "input_ids": (2, 24),
        "decoder_input_ids": (2, 5),
        "labels": (2, 5),
    }
    assert shapes(of("tiny-t5", sequence_length=24))["labels"] == (2, 24)
    with pytest.raises(ModelError, match="--target-length: tiny-bert does not read one text and write another"):
        workloads.load_workload(of("tiny-bert", target_length=5))


@pytest.mark.parametrize("model", ["resnet18", "resnet-cifar", "mine.py:build", "tiny-vit"])
def test_a_target_length_is_refused_by_what_writes_no_text(model: str) -> None:
    with pytest.raises(ModelError, match=f"--target-length: {model} .*; leave it out"):
        workloads.load_workload(of(model, target_length=5))


def test_a_case_without_a_target_length_has_the_key_that_it_had() -> None:
    plain = of("tiny-t5")

    assert plain.key() == "1a8d82eb0fdecf8f"
    assert plain.key() != of("tiny-t5", target_length=128).key()


@pytest.mark.parametrize(("written", "meant"), [(224, 224), ("224x224", 224), ("512x1024", "512x1024")])
def test_images_have_an_edge_or_height_and_width(written: int | str, meant: int | str) -> None:
    case = of("resnet18", image_size=written)

    assert case.image_size == meant
    assert Case.model_validate_json(case.model_dump_json()) == case
    assert case.key() == of("resnet18", image_size=meant).key()


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True, "", "x", "0x32", "32x", "32 x 32", "32x32x3"])
def test_a_wrong_size_of_images_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="image_size"):
        of("resnet18", image_size=wrong)


def test_images_of_every_kind_of_model_may_be_wide() -> None:
    assert shapes(of("resnet-cifar", image_size="32x64"))["images"] == (2, 3, 32, 64)
    assert shapes(of("tiny-vit", image_size="32x64"))["pixel_values"] == (2, 3, 32, 64)
    assert shapes(of("lraspp_mobilenet_v3_large", image_size="64x96")) == {
        "images": (2, 3, 64, 96),
        "labels": (2, 64, 96),
    }
    with pytest.raises(ModelError, match="--image-size 64x96: vit_b_16 takes square images only"):
        workloads.load_workload(of("vit_b_16", image_size="64x96"))


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "case",
    [
        of("tiny-t5", sequence_length=32, target_length=8),
        of("resnet-cifar", image_size="16x32"),
        of("tiny-vit", image_size="32x64"),
        of("lraspp_mobilenet_v3_large", image_size="64x96"),
        of("torchvision:fcn_resnet50", image_size="64x96"),
    ],
    ids=lambda case: case.model,
)
def test_the_simulation_agrees_with_the_allocator(case: Case) -> None:
    agree(case)


@pytest.mark.exhaustive
def test_masks_of_points_are_trained_by_the_loss_of_their_paper(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAM))
    case = of(str(tmp_path), weights="random")

    assert shapes(case) == {
        "pixel_values": (2, 3, 128, 128),
        "input_points": (2, 1, 1, 2),
        "input_labels": (2, 1, 1),
        "target_masks": (2, 32, 32),
    }
    assert agree(case).built == measure(case.model_copy(update={"scheme": "checkpoint"})).built


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("name", [name for name, task in tasks().items() if task == "semantic-segmentation"])
def test_a_segmentation_model_of_torchvision_is_simulated_at_its_usual_size(name: str) -> None:
    found = measure(of(name, meter="simulated", memory_limit_bytes=2**40))

    assert found.built is not None
    assert (found.built.task, found.built.image_size) == ("semantic-segmentation", (480, 480))
    assert found.activation_bytes > 2 * 4 * 480 * 480 * 21  # of the scores alone


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_a_detection_model_of_torchvision_is_measured(name: str) -> None:
    case = of(name, image_size="64x96")

    found = measure(case)

    assert found.built is not None
    assert (found.built.task, found.built.image_size) == ("object-detection", (64, 96))
    assert found.loss is not None
    assert found.loss > 0
    with pytest.raises(UntraceableError, match="matches boxes by the values of tensors"):
        measure(case.model_copy(update={"meter": "simulated"}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssd300_vgg16"]
)
def test_every_kind_of_detection_has_batches_and_losses(name: str) -> None:
    workload = workloads.load_workload(of(name, batch_size=1, image_size="64x96"))
    setup = workload.setup(materialize=True, seed=0)

    setup.forward(workload.batch(1, seed=0)).backward()

    assert all(parameter.grad is not None for parameter in setup.module.parameters() if parameter.requires_grad)


def test_models_for_points_of_bodies_are_refused() -> None:
    with pytest.raises(ModelError, match="is a detection model, for which actbench makes no batches"):
        workloads.load_workload(of("torchvision:keypointrcnn_resnet50_fpn"))


def test_one_image_is_refused_where_batch_norm_would_see_one_value_a_channel() -> None:
    workload = workloads.load_workload(of("deeplabv3_mobilenet_v3_large", batch_size=1, image_size=32))
    setup = workload.setup(materialize=False, seed=0)

    with pytest.raises(ModelError, match="take --batch-size 2 or more for each micro-batch"):
        setup.loss(setup.module, workload.batch(1, seed=0))
