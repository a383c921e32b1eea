"""Models that read pictures among their tokens, and the values of fake tensors that they look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.measuring.bench import Session
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator.fake import fake_mode

TEXT = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 512, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GRID = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 8}
TURNING = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
MARKS = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}
READER = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 8}
TILES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, "intermediate_size": 64,
    "vision_output_dim": 64, "image_size": 32, "patch_size": 8, "max_num_tiles": 2, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}  # fmt: skip


def reads(kind: str, text: str, vision: dict[str, Any], **fields: Any) -> dict[str, Any]:
    more = {"rope_parameters": TURNING} if kind.startswith("qwen") else {}
    return {
        "model_type": kind, "text_config": {"model_type": text, **TEXT, **more}, "vision_config": vision, **fields
    }  # fmt: skip


CONFIGS = {
    "LlavaForConditionalGeneration": reads(
        "llava", "llama", {"model_type": "clip_vision_model", **SIGHT}, image_token_index=110
    ),
    "PaliGemmaForConditionalGeneration": reads(
        "paligemma", "gemma", {"model_type": "siglip_vision_model", **SIGHT}, image_token_index=110, projection_dim=32
    ),
    "Gemma3ForConditionalGeneration": reads(
        "gemma3", "gemma3_text", {"model_type": "siglip_vision_model", **SIGHT}, image_token_index=110,
        mm_tokens_per_image=4,
    ),
    "Qwen2VLForConditionalGeneration": reads(
        "qwen2_vl", "qwen2_vl_text", {**GRID, "embed_dim": 32, "mlp_ratio": 2}, **MARKS
    ),
    "Qwen2_5_VLForConditionalGeneration": reads(
        "qwen2_5_vl", "qwen2_5_vl_text", {**GRID, "window_size": 32, "fullatt_block_indexes": [1]}, **MARKS
    ),
    "Qwen3VLForConditionalGeneration": reads(
        "qwen3_vl", "qwen3_vl_text", {**GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **MARKS
    ),
    "Idefics2ForConditionalGeneration": reads(
        "idefics2", "mistral", SIGHT, image_token_id=110,
        perceiver_config={**READER, "hidden_size": 32, "num_key_value_heads": 2},
    ),
    "Idefics3ForConditionalGeneration": reads("idefics3", "llama", SIGHT, image_token_id=110, scale_factor=2),
    "SmolVLMForConditionalGeneration": reads("smolvlm", "llama", SIGHT, image_token_id=110, scale_factor=2),
    "InternVLForConditionalGeneration": reads("internvl", "qwen2", SIGHT, image_token_id=110),
    "MllamaForConditionalGeneration": {
        "model_type": "mllama", "vision_config": TILES, "image_token_index": 110,
        "text_config": {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1]},
    },
}  # fmt: skip
TOKENS = {
    "LlavaForConditionalGeneration": 16,
    "Qwen2VLForConditionalGeneration": 196,
    "MllamaForConditionalGeneration": 1,
}


def both(model: str | Path, **fields: Any) -> tuple[Measurement, Measurement]:
    case = {"model": str(model), "batch_size": 2, "gradient_quality": False, "device_profile": "cpu", **fields}
    cpu, simulated = (Session(Case.model_validate({**case, "meter": meter})).memory() for meter in ("cpu", "simulated"))
    return cpu, simulated


def write(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], "architectures": [name]}))
    return folder


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_fed_pictures_among_its_tokens(tmp_path: Path, name: str) -> None:
    cpu, simulated = both(write(tmp_path, name))

    assert simulated.peak_bytes == pytest.approx(cpu.peak_bytes, rel=1e-4)
    assert simulated.activation_bytes == pytest.approx(cpu.activation_bytes, rel=1e-4)
    assert cpu.built is not None
    assert cpu.built.model_class == name
    if name in TOKENS:
        assert cpu.built.sequence_length == 128 + TOKENS[name]


OWN = """
import json
import torch
import transformers

def build():
    config = transformers.AutoConfig.from_pretrained({folder!r})
    model = transformers.AutoModelForImageTextToText.from_config(config)

    def make_batch(n):
        ids = torch.randint(3, 100, (n, 60))
        ids[:, 1:{last}] = 110
        labels = ids.masked_fill(ids == 110, -100)
        return {{"input_ids": ids, "labels": labels, "pixel_values": torch.randn(n, {shape})}}

    return model, make_batch, lambda model, batch: model(**batch).loss
"""


@pytest.mark.parametrize(("name", "tokens", "shape"), [
    ("LlavaForConditionalGeneration", 16, "3, 32, 32"),
    pytest.param("Idefics3ForConditionalGeneration", 4, "1, 3, 32, 32", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_function_builds_one_too(tmp_path: Path, name: str, tokens: int, shape: str) -> None:
    folder = str(write(tmp_path, name))
    (tmp_path / "own.py").write_text(OWN.format(folder=folder, last=1 + tokens, shape=shape))
    (tmp_path / "wrong.py").write_text(OWN.format(folder=folder, last=tokens, shape=shape))

    cpu, simulated = both(f"{tmp_path / 'own.py'}:build")

    assert simulated.peak_bytes == pytest.approx(cpu.peak_bytes, rel=1e-4)
    with pytest.raises(ValueError, match="do not match"):  # as with real tensors
        Session(Case(model=f"{tmp_path / 'wrong.py'}:build", batch_size=2, gradient_quality=False)).memory()


def test_a_sequence_that_is_too_short_for_a_picture_is_refused(tmp_path: Path) -> None:
    model = str(write(tmp_path, "LlavaForConditionalGeneration"))

    with pytest.raises(ModelError, match=r"--sequence-length 16: the picture of 32 x 32 px takes 16 tokens"):
        workloads.load_workload(Case(model=model, batch_size=1, sequence_length=16))


def test_values_of_integers_are_followed_and_forgotten() -> None:
    random = torch.Generator().manual_seed(0)
    real = torch.randint(5, (3, 7), generator=random)
    with fake_mode():
        ids = torch.randint(5, (3, 7), generator=torch.Generator().manual_seed(0))
        row, hidden = ids[1], torch.randn(3, 7, 4, requires_grad=True)
        ids[:, 2:4] = 9
        real[:, 2:4] = 9
        chosen = hidden[ids == 9]
        chosen.sum().backward()  # type: ignore[no-untyped-call]

        assert (ids.tolist(), row.tolist()) == (real.tolist(), real[1].tolist())
        assert chosen.shape == (6, 4)
        assert hidden.masked_select(ids.unsqueeze(-1) == 9).shape == (24,)
        assert (ids == 9).nonzero().tolist() == (real == 9).nonzero().tolist()
        row.copy_(hidden[0, :, 0].long())  # nobody knows these
        with pytest.raises(Exception, match="_local_scalar_dense"):
            ids.tolist()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            torch.empty(2, dtype=torch.int64).tolist()
