"""Compiled afresh, a converted architecture has the gradients of the uncompiled one, or the scheme refuses.

All families of torchvision's classification models and of the presets are here, narrow and shallow: a family's code
decides what a compiler makes of it, and its size only how long that takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from marks import slow_or_exhaustive
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import convnext, densenet, efficientnet, maxvit, mobilenetv3, regnet, resnet, swin_transformer

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.workload.sources import presets
from actbench.workload.torchvision import torchvision_names

# torch.compile says so where a recomputed block breaks the graph, and of Mamba's question for torch's version
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{begins}:UserWarning")
    for begins in ("Dynamo does not know how to trace", "Dynamo detected a call to a `functools.lru_cache`")
]

GROUPS = (
    ("fewbit:3+randomized:1", "fewbit:3"),
    (
        *("invact+lora:4+selective:half", "invact+selective:half", "invact+lora:4", "invact"),
        *("lora:4+selective:half", "selective:half", "lora:4"),
    ),
    (
        *("regelu2+qlora:4+checkpoint", "resilu2+qlora:4+checkpoint", "regelu2+checkpoint", "resilu2+checkpoint"),
        *("regelu2", "resilu2", "qlora:4+checkpoint", "checkpoint"),
    ),
)
"""Schemes that are compiled together, and what takes their place where not all find something to convert."""

FUSED, PLAIN = efficientnet.FusedMBConvConfig, efficientnet.MBConvConfig
NARROW = mobilenetv3.InvertedResidualConfig
SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
models: Any = torchvision.models


def without(model: nn.Module, *repeated: str) -> nn.Module:
    """Return the model without blocks that repeat the one before, which take minutes to compile."""
    for name in repeated:
        model.set_submodule(name, nn.Identity())
    return model


TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "alexnet": models.alexnet,
    "convnext": lambda: convnext.ConvNeXt([convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]),
    "densenet": lambda: densenet.DenseNet(8, (2, 2), 16),
    "efficientnet": lambda: efficientnet.EfficientNet([FUSED(4, 3, 2, 16, 16, 2), PLAIN(4, 3, 2, 16, 24, 2)], 0.0),
    "googlenet": lambda: without(models.googlenet(init_weights=False), "inception4b", "inception4c", "inception5a"),
    "inception": lambda: without(
        models.inception_v3(aux_logits=False, init_weights=False),
        *("Mixed_5d", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7c"),
    ),
    "maxvit": lambda: maxvit.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0),
    "mnasnet": models.mnasnet0_5,
    "mobilenetv2": lambda: models.MobileNetV2(width_mult=0.5, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]),
    "mobilenetv3": lambda: mobilenetv3.MobileNetV3(
        [NARROW(16, 3, 16, 16, True, "RE", 2, 1, 1), NARROW(16, 5, 32, 16, True, "HS", 1, 1, 1)], 32
    ),
    "regnet": lambda: regnet.RegNet(regnet.BlockParams.from_init_params(4, 16, 24.0, 2.0, 8, se_ratio=0.25)),
    "resnet": lambda: resnet.ResNet(resnet.Bottleneck, [2, 1, 1, 1], groups=2, width_per_group=8),
    "resnet18": lambda: resnet.ResNet(resnet.BasicBlock, [2, 1, 1, 1]),
    "shufflenetv2": lambda: models.ShuffleNetV2([2, 2, 2], [24, 16, 32, 48, 64]),
    "squeezenet": models.squeezenet1_1,
    "swin_transformer": lambda: swin_transformer.SwinTransformer(**SWIN, stochastic_depth_prob=0.0),
    "swin_v2": lambda: swin_transformer.SwinTransformer(
        **SWIN,
        stochastic_depth_prob=0.0,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    ),
    "vgg": models.vgg11_bn,
    "vision_transformer": lambda: models.VisionTransformer(64, 16, 2, 2, 32, 64),
}
FURTHER = {
    *("alexnet", "densenet", "googlenet", "inception", "maxvit", "mnasnet", "mobilenetv2", "regnet", "swin_v2", "vgg"),
    *("efficientnet", "resnet", "shufflenetv2", "squeezenet", "swin_transformer", "llama", "convnext", "mobilenetv3"),
    *("dinov2", "distilbert", "gemma2", "granite", "mistral", "phi3", "qwen2", "qwen3", "roberta", "siglip"),
    *("bert", "clip", "deberta-v2", "deepseek_v2", "gemma3_text", "mamba", "mixtral", "modernbert", "qwen3_moe", "sam"),
    *("t5", "vit", "wav2vec2", "whisper"),
}
"""Families whose code is like that of others, or that take long to compile."""

FAMILIES = {preset.config["model_type"]: name for name, preset in reversed(presets().items())}

NARROWED = {
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_key_value_heads"], 1),
    **dict.fromkeys(["hidden_size", "dim", "n_embd", "d_model", "pooler_hidden_size", "moe_intermediate_size"], 32),
    **dict.fromkeys(["num_attention_heads", "n_heads", "n_head", "num_heads", "num_experts_per_tok"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["intermediate_size", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"], 64),
    **dict.fromkeys(["head_dim", "d_kv", "query_pre_attn_scalar"], 16),
    **dict.fromkeys(["num_local_experts", "num_experts"], 4),
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "max_source_positions": 50,
    "vocab_size": 500,
}

OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 2},  # each head has keys of its own
    "sam": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
            "image_size": 64,
            "patch_size": 16,
            "output_channels": 32,
            "window_size": 4,
            "num_pos_feats": 16,
        },
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32},
    },
}
UNCOMPILED = {"detr"}  # its own loss is not compiled: transformers calls requires_grad_ with a tensor there

Setup = Callable[[], tuple[TrainingSetup, Batch]]


def narrowed(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        key: narrowed(value) if isinstance(value, dict) else NARROWED.get(key, value) for key, value in config.items()
    }
    found |= {key: min(value, 499) for key, value in found.items() if key.endswith("_token_id")}
    found |= {"image_size": max(32, 4 * config["patch_size"])} if "image_size" in config else {}
    return found | OWN.get(config.get("model_type", ""), {})


def of_torchvision(name: str) -> Setup:
    def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        found = model(batch["x"])
        heads = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
        return sum(F.cross_entropy(each, batch["y"]) for each in heads)  # type: ignore[return-value]

    def make() -> tuple[TrainingSetup, Batch]:
        size = 96 if name == "inception" else 64
        model = TORCHVISION[name]()
        return TrainingSetup(model, loss=loss), {"x": torch.randn(4, 3, size, size), "y": torch.arange(4)}

    return make


def of_preset(name: str, folder: Path) -> Setup:
    preset = presets()[name]
    (folder / "config.json").write_text(json.dumps(narrowed(preset.config)))
    workload = workloads.load_workload(
        Case(model=str(folder), task=preset.task, batch_size=4, weights="random", sequence_length=16)
    )
    return lambda: (workload.setup(materialize=True, seed=0), workload.batch(4, seed=0))


def gradient(setup: TrainingSetup, batch: Batch, run: Any = None) -> Tensor:
    trained = [parameter for parameter in setup.module.parameters() if parameter.requires_grad]
    assert setup.loss is not None
    found = torch.autograd.grad(setup.loss(setup.module if run is None else run, batch), trained, allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def made(make: Setup, spec: str) -> tuple[TrainingSetup, Batch]:
    """Return a converted setup without dropout, the same at each call."""
    torch.manual_seed(0)
    setup, batch = make()
    for part in setup.module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(part, name, 0.0)
    torch.manual_seed(0)
    setup = schemes.build(spec).apply(setup)
    for parameter in setup.module.parameters():
        if "lora" in spec and parameter.requires_grad and not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # the matrix beside one of zeros has a gradient of zeros
    return setup, batch


def off(make: Setup, spec: str, backend: str) -> float:
    """Return how far a compiled gradient is from the uncompiled one, relative to that; 0 where the scheme refuses."""
    setup, batch = made(make, spec)
    wanted = gradient(setup, batch)
    setup, batch = made(make, spec)
    torch._dynamo.reset()
    try:
        found = gradient(setup, batch, torch.compile(setup.module, backend=backend))
    except ConversionError:
        return 0.0
    return float((found - wanted).norm() / wanted.norm())


def check(make: Setup, backend: str = "aot_eager", groups: tuple[tuple[str, ...], ...] = GROUPS) -> None:
    plain = off(make, "exact", backend)
    assert plain < 1e-3, "this model shows nothing: its own gradient changes when it is compiled"
    for group in groups:
        for spec in group:
            try:
                made(make, spec)
            except (ConversionError, ValueError):  # nothing to convert, no known block, or peft's refusal of Mamba
                continue
            found = off(make, spec, backend)
            assert found <= 10 * plain + 1e-5, spec
            break


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", slow_or_exhaustive(TORCHVISION, FURTHER.__contains__))
def test_a_family_of_torchvision_has_its_gradients(name: str) -> None:
    check(of_torchvision(name))


@pytest.mark.filterwarnings("ignore:.*slow reference code:UserWarning")
@pytest.mark.parametrize("family", slow_or_exhaustive(sorted(FAMILIES.keys() - UNCOMPILED), FURTHER.__contains__))
def test_a_family_of_presets_has_its_gradients(family: str, tmp_path: Path) -> None:
    check(of_preset(FAMILIES[family], tmp_path))


def test_no_family_of_torchvision_is_missing() -> None:
    wanted = {models.get_model_builder(name).__module__.rpartition(".")[2] for name in torchvision_names()}
    assert wanted <= {*TORCHVISION}
