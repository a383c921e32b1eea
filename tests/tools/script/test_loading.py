from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import MeasurementError
from actbench.simulator import profiles
from actbench.simulator.fake import fake_mode, without_memory
from actbench.tools.script.libraries.libraries import prepared
from actbench.tools.script.simulation import Simulation
from actbench.tools.script.values.subclasses import subclasses_made

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Enter a run whose tensors are fake; yields what it notes."""
    found: list[str] = []
    with warnings.catch_warnings(), without_memory(fake_mode()), prepared(found.append), subclasses_made():
        warnings.simplefilter("ignore")  # of libraries, which name what they will rename
        yield found


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with a config and no weights."""
    return folder(tmp_path / "llama", LLAMA)


def folder(place: Path, config: dict[str, Any], name: str = "config.json") -> str:
    place.mkdir()
    (place / name).write_text(json.dumps(config))
    return str(place)


def causal(*args: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(*args, **options)


def step(model: Any) -> torch.Tensor:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = model(input_ids=tokens, labels=tokens)
    found.loss.backward()
    return found.loss  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_folder_without_weights_becomes_a_model_of_the_types_of_its_config(llama: str, notes: list[str]) -> None:
    model, info = causal(llama, output_loading_info=True)

    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert isinstance(model.lm_head.weight, FakeTensor)
    assert not model.training
    assert not info["missing_keys"]
    assert model.model.rotary_emb.inv_freq[0] == 1  # not a weight: it keeps its values
    assert any("no weights are read" in note for note in notes)


@pytest.mark.exhaustive
def test_a_type_that_is_asked_for_wins(llama: str, notes: list[str]) -> None:
    assert causal(llama, dtype=torch.float32).dtype == torch.float32
    assert causal(llama, torch_dtype="float16").dtype == torch.float16


@pytest.mark.exhaustive
def test_a_model_without_a_type_is_in_float32(tmp_path: Path, notes: list[str]) -> None:
    untyped = {key: value for key, value in LLAMA.items() if key != "dtype"}

    assert causal(folder(tmp_path / "llama", untyped)).dtype == torch.float32


def test_no_byte_of_weights_is_read(llama: str, notes: list[str]) -> None:
    (Path(llama) / "pytorch_model.bin").write_bytes(b"no weights at all")

    assert causal(llama).num_parameters() > 0


@pytest.mark.slow
def test_a_model_that_is_not_there_comes_from_a_shipped_config(notes: list[str]) -> None:
    model = causal("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)

    assert model.num_parameters() == 8_030_261_248
    assert any("ships as llama-3.1-8b" in note for note in notes)
    assert model.config.architectures == ["LlamaForCausalLM"]


def test_a_model_that_is_nowhere_is_named_with_what_to_do(notes: list[str]) -> None:
    with pytest.raises(OSError, match=r"hf download nobody/nothing config\.json"):
        causal("nobody/nothing")


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(("twice", "absmax_bytes"), [(False, 4 * 2048), (True, 2048 + 4 * 8)])
def test_four_bits_have_the_bytes_of_bitsandbytes(llama: str, notes: list[str], twice: bool, absmax_bytes: int) -> None:
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=twice)
    model = causal(llama, quantization_config=bits, device_map={"": "cpu"})
    weight = model.model.layers[0].mlp.up_proj.weight
    state = weight.quant_state

    assert type(weight).__name__ == "Params4bit"
    assert weight.untyped_storage().nbytes() == 256 * 512 // 2
    scales = [state.absmax, *([state.state2.absmax] if twice else [])]
    assert sum(each.numel() * each.element_size() for each in scales) == absmax_bytes
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_eight_bits_have_the_bytes_of_bitsandbytes(llama: str, notes: list[str]) -> None:
    from transformers import BitsAndBytesConfig

    model = causal(llama, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"})
    model.enable_input_require_grads()
    step(model)

    weight = model.model.layers[0].mlp.up_proj.weight
    assert (weight.dtype, weight.shape) == (torch.int8, (512, 256))
    assert any("outlier" in note for note in notes)


@pytest.mark.slow
def test_adapters_train_on_packed_weights(llama: str, notes: list[str]) -> None:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = prepare_model_for_kbit_training(causal(llama, quantization_config=bits, device_map={"": "cpu"}))
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
    nn.Module.to(model, "cpu")  # as trainers move models
    model.train()
    step(model)

    packed = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    assert len(packed) == 14
    assert all(p.dtype == torch.uint8 and p.quant_state is not None for p in packed)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.exhaustive
def test_an_adapter_is_built_from_its_config(llama: str, tmp_path: Path, notes: list[str]) -> None:
    from peft import PeftModel

    config = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": llama,
    }
    adapter = folder(tmp_path / "adapter", config, "adapter_config.json")

    model = PeftModel.from_pretrained(causal(llama), adapter, is_trainable=True)

    assert len([p for p in model.parameters() if p.requires_grad]) == 4
    assert sum("lora_A" in name for name, _ in causal(adapter).named_parameters()) == 2


@pytest.mark.slow
def test_a_model_in_several_places_is_refused(llama: str, notes: list[str]) -> None:
    with pytest.raises(MeasurementError, match="the whole model on it"):
        causal(llama, device_map={"model": 0, "lm_head": "cpu"})


@pytest.mark.slow
def test_other_quantizations_are_refused(llama: str, notes: list[str]) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    with pytest.raises(MeasurementError, match=r"torchao.*is not simulated"):
        causal(llama, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map={"": "cpu"})


@pytest.mark.slow
def test_vision_models_download_nothing(notes: list[str]) -> None:
    import timm
    import torchvision

    assert torchvision.models.resnet18(weights="DEFAULT").fc.weight.shape == (1000, 512)
    assert timm.create_model("resnet18", pretrained=True, num_classes=7).fc.weight.shape == (7, 512)
    assert {note.partition(":")[0] for note in notes} >= {"torch.hub", "timm"}


@pytest.mark.slow
def test_a_diffusion_model_is_built_from_its_config(tmp_path: Path, notes: list[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 8,
        "block_out_channels": [32, 64],
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    }

    model = diffusers.UNet2DConditionModel.from_pretrained(folder(tmp_path / "unet", config), torch_dtype=torch.float16)

    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not model.training


@pytest.mark.slow
def test_weights_in_a_file_fill_a_model_without_being_read(tmp_path: Path) -> None:
    real = nn.Linear(300, 300)
    torch.save(real.state_dict(), tmp_path / "weights.pt")
    with without_memory(fake_mode()), prepared(print):
        model = nn.Linear(300, 300)
        found = model.load_state_dict(torch.load(tmp_path / "weights.pt"))
        assert isinstance(model.weight, FakeTensor)
        with pytest.raises(RuntimeError, match="size mismatch"):
            nn.Linear(299, 300).load_state_dict(torch.load(tmp_path / "weights.pt"))

    assert not found.missing_keys
    assert torch.load(tmp_path / "weights.pt")["weight"].equal(real.weight)


@pytest.mark.slow
def test_afterwards_everything_is_as_before(llama: str) -> None:
    from transformers import PreTrainedModel

    before = vars(PreTrainedModel)["from_pretrained"], torch.save, torch.compile, vars(nn.Module)["load_state_dict"]
    with prepared(print):
        assert vars(PreTrainedModel)["from_pretrained"] is not before[0]
    after = vars(PreTrainedModel)["from_pretrained"], torch.save, torch.compile, vars(nn.Module)["load_state_dict"]

    assert after == before
    assert "_make_subclass" not in vars(torch.Tensor)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("place", ["auto", {"": 0}, "cuda"])
def test_packed_weights_are_on_the_card(llama: str, place: Any) -> None:
    from transformers import BitsAndBytesConfig

    with warnings.catch_warnings(), Simulation(profiles.get("rtx-4090")) as run:
        warnings.simplefilter("ignore")
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = causal(llama, quantization_config=bits, device_map=place)
        held = run.memory.allocated_bytes()
        devices = {str(p.device) for p in model.parameters()}
        footprint = model.get_memory_footprint()

    packed = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)  # weights of both layers
    assert devices == {"cuda:0"}
    assert footprint - packed // 2 == 2 * (2 * 1000 * 256 + 5 * 256) + 2 * 4 * 32  # and rotary frequencies
    assert packed * (1 / 2 + 4 / 64) < held - 2 * 2 * 1000 * 256 < packed * (1 / 2 + 4 / 64) + 64 * 512


@pytest.mark.slow
def test_weights_go_where_they_are_asked_to(llama: str) -> None:
    with warnings.catch_warnings(), Simulation(profiles.get("rtx-4090")) as run:
        warnings.simplefilter("ignore")
        on_host = causal(llama)
        assert run.memory.allocated_bytes() == 0
        on_card = causal(llama, device_map="auto")
        assert run.memory.allocated_bytes() > 2 * on_card.num_parameters()

        assert {str(p.device) for p in on_host.parameters()} == {"cpu"}
        assert {str(p.device) for p in on_card.parameters()} == {"cuda:0"}
