"""Which operators do the models of other libraries run that the cost model does not know?

A step of each architecture, two blocks deep where its config says how many it has, runs on fake tensors through the
simulated meter of a card with rates. Each line names a model, and the operators without a kind, or why it did not run.
Add kinds to ``src/actbench/simulator/cost/kinds.toml``::

    .venv/bin/python benchmarks/unknown_operators.py                        # all libraries that are installed
    .venv/bin/python benchmarks/unknown_operators.py timm transformers
    .venv/bin/python benchmarks/unknown_operators.py transformers --only 'llama|bert'
    PYTHONPATH=folder .venv/bin/python benchmarks/unknown_operators.py diffusers
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.profiles import get
from actbench.simulator.simulated import SimulatedMeter
from actbench.workload.base import construct

DEVICE = "rtx-4090"

Model = tuple[str, Callable[[], tuple[str, ...]]]
"""A name, and what returns the unknown operators of a step."""

TORCHVISION = (
    "alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3", "squeezenet1_1",
    "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf", "mnasnet0_5",
    "shufflenet_v2_x0_5", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t",
)  # fmt: skip

TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "coat_lite_tiny", "coatnet_0_rw_224", "convit_tiny", "convmixer_768_32",
    "convnextv2_atto", "crossvit_tiny_240", "cspresnet50", "davit_tiny", "deit_tiny_patch16_224", "dla34", "dpn48b",
    "eca_halonext26ts", "edgenext_xx_small", "efficientformer_l1", "efficientvit_b0", "eva02_tiny_patch14_224",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_050", "hardcorenas_a", "hgnet_tiny", "hiera_tiny_224",
    "hrnet_w18_small", "inception_next_tiny", "lambda_resnet26t", "levit_128s", "lcnet_050", "mambaout_femto",
    "maxvit_tiny_rw_224", "mixer_s16_224", "mobilenetv4_conv_small", "mobileone_s0", "mobilevit_xxs",
    "mvitv2_tiny", "nest_tiny", "nfnet_f0", "nextvit_small", "pit_ti_224", "poolformer_s12", "pvt_v2_b0", "regnetz_b16",
    "repvgg_a0", "res2net50_26w_4s", "resmlp_12_224", "resnest14d", "resnetv2_50", "rexnet_100", "samvit_base_patch16",
    "seresnet18", "sequencer2d_s", "skresnet18", "starnet_s1", "swinv2_cr_tiny_224", "tiny_vit_5m_224", "tinynet_e",
    "tnt_s_patch16_224", "tresnet_m", "twins_svt_small", "vgg11", "visformer_tiny", "vit_tiny_patch16_224",
    "volo_d1_224", "vovnet39a", "xception41", "xcit_nano_12_p16_224",
)  # fmt: skip


def class_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a model's logits, of the first where there are several."""
    found: Any = module(batch["x"])
    logits = found if isinstance(found, Tensor) else found[0]
    return nn.functional.cross_entropy(logits.flatten(1), batch["y"])


def square_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Return the squared error of a denoiser, as diffusers' training scripts do."""
    found: Any = module(**batch, return_dict=False)
    predicted: Tensor = found[0]
    return nn.functional.mse_loss(predicted.float(), torch.zeros_like(predicted).float())


def unknown(make: Callable[[], nn.Module], batch: Callable[[], Batch], loss: Any) -> tuple[str, ...]:
    """Return the operators of a step of a module that have no kind."""
    module = construct(make, materialize=False, seed=0).train()
    meter = SimulatedMeter(get(DEVICE))
    setup = meter.adopt(TrainingSetup(module, loss, lambda each: torch.optim.AdamW(each.parameters())))
    with meter.active():
        reading = meter.memory(TrainStep(setup, meter.place(batch())))
    assert reading.estimated is not None
    return reading.estimated.unknown


def of_images(make: Callable[[], nn.Module], size: int) -> tuple[str, ...]:
    """Return what :func:`unknown` does of a classifier of images."""
    return unknown(make, lambda: {"x": torch.randn(4, 3, size, size), "y": torch.randint(0, 10, (4,))}, class_loss)


def of_torchvision() -> Iterator[Model]:
    """Yield one architecture of each family."""
    models = importlib.import_module("torchvision").models
    for name in TORCHVISION:
        size = 299 if name == "inception_v3" else 224
        given = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        make = lambda name=name, given=given: models.get_model(name, num_classes=10, **given)  # noqa: E731
        yield name, lambda make=make, size=size: of_images(make, size)


def of_timm() -> Iterator[Model]:
    """Yield one architecture of each family."""
    timm = importlib.import_module("timm")
    for name in TIMM:
        make = lambda name=name: timm.create_model(name, num_classes=10)  # noqa: E731
        size = timm.get_pretrained_cfg(name).input_size[-1] if timm.get_pretrained_cfg(name) else 224
        yield name, lambda make=make, size=size: of_images(make, size)


_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal-lm",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked-lm",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq-lm",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence-classification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image-classification",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": "semantic-segmentation",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES": "depth-estimation",
    "MODEL_FOR_CTC_MAPPING_NAMES": "ctc",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio-classification",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "speech-seq2seq",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image-text-contrastive",
    "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES": "masked-image-modeling",
}


def of_transformers() -> Iterator[Model]:
    """Yield every architecture that has one of the tasks, by its default config with two blocks."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    known = importlib.import_module("transformers").CONFIG_MAPPING
    seen = set()
    for mapping, task in _TASKS.items():
        for kind in getattr(auto, mapping):
            if kind in known and kind not in seen:
                seen.add(kind)
                yield kind, lambda kind=kind, task=task: of_config(known[kind], task)


def of_config(kind: Any, task: str) -> tuple[str, ...]:
    """Return the unknown operators of a model of a class of configs, by way of a folder that says what it is."""
    config = kind().to_dict()
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"):
            if isinstance(part.get(name), int):
                part[name] = 2
        if isinstance(part.get("layer_types"), list):
            part["layer_types"] = part["layer_types"][:2]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        case = Case(
            model=folder, task=task, weights="random", batch_size=2, gradient_quality=False, device_profile=DEVICE
        )
        found = measure(case).estimated
    assert found is not None
    return found.unknown


def of_diffusers() -> Iterator[Model]:
    """Yield denoisers and an autoencoder, in small sizes."""
    library = importlib.import_module("diffusers")

    def sample(*size: int, **others: Any) -> Callable[[], Batch]:
        return lambda: {"sample": torch.randn(size), "timestep": torch.ones(size[0]).long(), **others}

    def conditioned() -> Batch:
        return {**sample(2, 4, 32, 32)(), "encoder_hidden_states": torch.randn(2, 77, 64)}

    small = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 32}
    crossed = {"cross_attention_dim": 64, "attention_head_dim": 8}
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    plain = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    words = {"hidden_states": (2, 4, 32, 32), "encoder_hidden_states": (2, 77, 64)}

    def attended(**sizes: tuple[int, ...]) -> Callable[[], Batch]:
        return lambda: {name: torch.randn(size) for name, size in sizes.items()} | {"timestep": torch.ones(2).long()}

    found: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
        "UNet2DModel": (lambda: library.UNet2DModel(**small, **plain), sample(2, 3, 32, 32)),
        "UNet2DConditionModel": (lambda: library.UNet2DConditionModel(**small, **crossed, **blocks), conditioned),
        "AutoencoderKL": (
            lambda: library.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=32),
            lambda: {"sample": torch.randn(2, 3, 32, 32)},
        ),
        "VQModel": (
            lambda: library.VQModel(block_out_channels=(32,), norm_num_groups=8),
            lambda: {"sample": torch.randn(2, 3, 32, 32)},
        ),
        "DiTTransformer2DModel": (
            lambda: library.DiTTransformer2DModel(num_layers=2, num_attention_heads=2, attention_head_dim=32),
            lambda: {
                **attended(hidden_states=(2, 4, 32, 32))(),
                "class_labels": torch.ones(2).long(),
            },
        ),
        "PixArtTransformer2DModel": (
            lambda: library.PixArtTransformer2DModel(
                num_layers=2, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=64,
                sample_size=32, out_channels=4,
            ),
            attended(**words),
        ),
        "SD3Transformer2DModel": (
            lambda: library.SD3Transformer2DModel(
                num_layers=2, num_attention_heads=2, attention_head_dim=32, joint_attention_dim=64,
                caption_projection_dim=64, pooled_projection_dim=64, sample_size=32, in_channels=4, out_channels=4,
            ),
            attended(**words, pooled_projections=(2, 64)),
        ),
    }  # fmt: skip
    for name, (make, batch) in found.items():
        yield name, lambda make=make, batch=batch: unknown(make, batch, square_loss)


LIBRARIES = {
    "torchvision": of_torchvision,
    "timm": of_timm,
    "transformers": of_transformers,
    "diffusers": of_diffusers,
}


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", choices=[*LIBRARIES, []], default=[*LIBRARIES])
    parser.add_argument("--only", default="", help="a regular expression of names")
    flags = parser.parse_args()
    for library in flags.libraries:
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed", flush=True)
            continue
        for name, run in LIBRARIES[library]():
            if not re.search(flags.only, name):
                continue
            try:
                found = ", ".join(run()) or "all known"
            except Exception as error:  # one model must not end the list
                found = f"does not run here: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"{library} {name}: {found}", flush=True)


if __name__ == "__main__":
    main()
