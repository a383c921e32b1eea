"""Small configs of many kinds of models of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Config = dict[str, Any]

TEXT: Config = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
}
IMAGES: Config = {**TEXT, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}
SIDES: Config = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
}
SPEECH: Config = {
    **SIDES,
    "vocab_size": 99,
    "d_model": 32,
    "max_target_positions": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
STAGES: Config = {
    "depths": [1] * 4,
    "hidden_sizes": [8, 16, 16, 16],
    "num_attention_heads": [1, 2, 2, 2],
    "decoder_hidden_size": 16,
}
RESNET: Config = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8] * 4,
    "depths": [1] * 4,
    "out_features": ["stage4"],
}
READING: Config = {**TEXT, "encoder_hidden_size": 32, "bos_token_id": 97, "sep_token_id": 96, "eos_token_id": 96}
CONFIGS: dict[str, Config] = {
    "Bert": {"model_type": "bert", **TEXT},
    "Electra": {"model_type": "electra", **TEXT},
    "DebertaV2": {"model_type": "deberta-v2", **TEXT, "num_labels": 3},
    "T5": {
        "model_type": "t5",
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
    },
    "Mamba": {"model_type": "mamba", "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 2},
    "Qwen3Next": {
        "model_type": "qwen3_next",
        **TEXT,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 2,
        "layer_types": ["linear_attention", "linear_attention"],
    },
    "Whisper": {"model_type": "whisper", **SPEECH, "num_mel_bins": 8, "max_source_positions": 50},
    "Speech2Text": {
        "model_type": "speech_to_text",
        **SPEECH,
        "conv_channels": 32,
        "input_feat_per_channel": 8,
        "max_source_positions": 100,
    },
    "Wav2Vec2": {
        "model_type": "wav2vec2",
        **TEXT,
        "conv_dim": [8] * 7,
        "conv_stride": [40, *[2] * 6],
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "layerdrop": 0.5,
        "mask_time_prob": 0.5,
    },
    "ViT": {"model_type": "vit", **IMAGES, "encoder_stride": 8},
    "Segformer": {"model_type": "segformer", **STAGES},
    "GLPN": {"model_type": "glpn", **STAGES},
    "DPT": {
        "model_type": "dpt",
        **IMAGES,
        "is_hybrid": False,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8] * 4,
        "fusion_hidden_size": 8,
    },
    "Yolos": {"model_type": "yolos", **IMAGES, "image_size": [32, 48], "num_detection_tokens": 10},
    "Detr": {
        "model_type": "detr",
        **SIDES,
        "d_model": 32,
        "num_queries": 12,
        "use_timm_backbone": False,
        "backbone_config": RESNET,
    },
    "CLIP": {
        "model_type": "clip",
        "vision_config": IMAGES,
        "text_config": {**TEXT, "eos_token_id": 98, "pad_token_id": 1},
    },
    "Blip": {"model_type": "blip", "vision_config": IMAGES, "text_config": READING},
    "LlavaNext": {"model_type": "llava_next"},
    "Gemma3n": {"model_type": "gemma3n"},
    "Qwen2Audio": {"model_type": "qwen2_audio"},
}
"""A config for the classes whose names begin so."""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Give what writes a config for a class, as save_pretrained does, with changes to it, and returns its folder."""

    def write(name: str, **changes: Any) -> Path:
        config = next(config for prefix, config in CONFIGS.items() if name.startswith(prefix))
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [name], **changes}))
        return folder

    return write
