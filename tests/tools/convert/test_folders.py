from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, ModelError, SpecError, StoreError
from actbench.tools.convert.folders import load_converted, save_converted
from actbench.tools.convert.model import conversion_of, convert

WIDTH, TOKENS, SAMPLES = 32, 16, 4
SPEC = "fewbit:3+randomized:0.5"


def gpt2(seed: int = 0, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 2, "vocab_size": 99}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def vit(seed: int = 0, layers: int = 2, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=16))


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 99, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a converted tiny GPT-2."""
    return save_converted(convert(gpt2(), SPEC), tmp_path / "model")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "actbench.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_round_trip_gives_equal_outputs_and_the_same_mark(tmp_path: Path):
    model = convert(gpt2(), SPEC)
    back = load_converted(save_converted(model, tmp_path / "model"))
    assert torch.equal(logits(back), logits(model))
    assert conversion_of(back) == conversion_of(model)
    assert back.lm_head.weight is back.transformer.wte.weight
    assert not back.training


def test_a_model_whose_file_has_other_names_than_the_model_comes_back(tmp_path: Path):
    model = convert(vit(), "fewbit:3").eval()
    back = load_converted(save_converted(model, tmp_path / "model"))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(back(images).logits, model(images).logits)


def test_plain_from_pretrained_loads_the_unconverted_model(folder: Path):
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(plain), logits(gpt2()))
    assert conversion_of(plain) is None
    assert type(plain.transformer.h[0].mlp.act) is type(gpt2().transformer.h[0].mlp.act)


def test_the_folder_holds_what_save_pretrained_writes_and_one_file_more(folder: Path, tmp_path: Path):
    gpt2().save_pretrained(tmp_path / "plain")
    expected = {path.name for path in (tmp_path / "plain").iterdir()} | {"actbench.json"}
    assert {path.name for path in folder.iterdir()} == expected
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "model"}


def test_a_torchvision_model_comes_back_by_its_name(tmp_path: Path):
    torch.manual_seed(0)
    model = convert(torchvision.models.resnet18(), "checkpoint").eval()
    folder = save_converted(model, tmp_path / "model", built_from="resnet18")
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "actbench.json"}
    back = load_converted(folder)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(back(images), model(images))


def own() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def tied() -> nn.Sequential:
    model = own()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("make", [own, tied])
def test_a_model_of_ones_own_is_filled(tmp_path: Path, make: Any):
    model = convert(make(), "fewbit:3")
    folder = save_converted(model, tmp_path / "model")
    back = load_converted(folder, model=make())
    x = torch.randn(5, 8)
    assert torch.equal(back(x), model(x))
    assert conversion_of(back) is not None
    with pytest.raises(ModelError, match="model="):
        load_converted(folder)


def test_a_class_that_actbench_does_not_build_is_given(tmp_path: Path):
    model = convert(gpt2().transformer, "fewbit:3").eval()
    folder = save_converted(model, tmp_path / "model")
    with pytest.raises(ModelError, match="GPT2Model"):
        load_converted(folder)
    back = load_converted(folder, model=transformers.GPT2Model.from_pretrained(folder))
    ids = torch.arange(4)[None]
    assert torch.equal(back(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("make", [gpt2, vit])  # vit: transformers writes other names than the model's
def test_a_given_model_of_transformers_is_filled(tmp_path: Path, make: Any):
    folder = save_converted(convert(make(), "fewbit:3"), tmp_path / "model")
    back = load_converted(folder, model=make(seed=1))
    assert all(torch.equal(tensor, make().state_dict()[name]) for name, tensor in back.state_dict().items())
    assert conversion_of(back) is not None
    assert not back.training


@pytest.mark.parametrize("other", [own, lambda: gpt2().transformer])
def test_a_given_model_of_another_class_is_refused(folder: Path, other: Any):
    with pytest.raises(ModelError, match=r"holds a GPT2LMHeadModel, and the given model is a (Seq|GPT2Model).*; give"):
        load_converted(folder, model=other())


@pytest.mark.parametrize(
    ("make", "other", "message"),
    [
        (gpt2, {"layers": 3}, r"no tensor for transformer\.h\.2"),
        (vit, {"layers": 3}, r"no tensor for vit\..*layers?\.2"),
        (vit, {"layers": 1}, r"the model lacks: vit\..*layers?\.1"),
        (vit, {"width": 64}, "another shape of classifier"),
    ],
)
def test_a_given_model_of_another_config_is_refused(tmp_path: Path, make: Any, other: dict[str, int], message: str):
    folder = save_converted(convert(make(), "fewbit:3"), tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load_converted(folder, model=make(**other))


def test_an_unconverted_model_is_not_saved(tmp_path: Path):
    with pytest.raises(ConversionError, match="not converted"):
        save_converted(gpt2(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_converted_model_is_replaced_only_by_force(folder: Path):
    model = convert(own(), "fewbit:2")
    with pytest.raises(StoreError, match="--force"):
        save_converted(model, folder)
    save_converted(model, folder, force=True)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "actbench.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_what_is_no_converted_folder_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="is not a folder"):
        load_converted(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"holds no actbench\.json"):
        load_converted(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"schema_version": 1', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "schema_version: field required"),
        ('{"schema_version": 2}', "written by a later actbench"),
        (" " * (16 * 1024**2 + 1), "it has more than 16.00 MiB"),
    ],
)
def test_a_broken_description_is_refused(folder: Path, content: str, message: str):
    (folder / "actbench.json").write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_converted(folder)
    assert str(folder / "actbench.json") in str(caught.value)


@pytest.mark.parametrize("changes", [{"surprise": 1}, {"task": "painting"}, {"image_size": -1}, {"sites": "all"}])
def test_a_description_of_another_shape_is_refused(folder: Path, changes: dict[str, Any]):
    edit(folder, **changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        load_converted(folder)


def test_a_scheme_that_does_not_exist_is_refused(folder: Path):
    edit(folder, scheme="fewbit:99")
    with pytest.raises(SpecError, match="fewbit:99"):
        load_converted(folder)


@pytest.mark.parametrize("kind", ["torchvision", "module"])
def test_code_that_a_folder_names_is_never_run(folder: Path, tmp_path: Path, kind: str):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef build(): pass\n")
    edit(folder, kind=kind, model=f"{evil}:build")
    with pytest.raises(ModelError, match="model="):
        load_converted(folder)
    assert not (tmp_path / "ran").exists()


def test_an_injected_scheme_runs_no_code_even_if_its_class_imports_what_it_is_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(x): return x\n")
    for scheme in (f"fewbit:3,functions={evil}:f", "fewbit:3,functions=evil.things:f"):
        edit(folder, scheme=scheme)
        with monkeypatch.context() as patched:
            patched.setattr(schemes, "build", lambda text: pytest.fail("it is built before it is trusted"))
            with pytest.raises(ModelError, match=r"evil.*trust_remote_code=True"):
                load_converted(folder)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_named(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_converted(folder)


def test_a_pickle_is_never_read(folder: Path, tmp_path: Path):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load_converted(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_truncated_weights_are_refused(folder: Path, part: float):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_converted(folder)


def test_a_missing_or_broken_config_is_refused(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_converted(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_converted(folder)


def test_a_tensor_that_is_not_in_the_weights_is_told(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"transformer\.h\.0\.mlp\.c_fc\.bias"):
        load_converted(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(*own(), nn.Linear(8, 8)), r"no tensor for 3\.weight"),
        (lambda: own()[:2], r"the model lacks: 2\.\w+ \(2 in all\)"),
        (lambda: nn.Sequential(nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 8)), "size mismatch for 0.weight"),
    ],
)
def test_weights_that_do_not_fit_the_given_model_are_refused(tmp_path: Path, make: Any, message: str):
    folder = save_converted(convert(own(), "fewbit:3"), tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load_converted(folder, model=make())


@pytest.mark.parametrize("name", ["m.py:build", "x@num_layers=1", "torchvision:resnet18"])
def test_the_name_of_a_folder_is_only_a_name(tmp_path: Path, name: str):
    (tmp_path / "m.py").write_text("raise SystemExit('code ran')")
    model = convert(gpt2(), SPEC)

    back = load_converted(save_converted(model, tmp_path / name))

    assert torch.equal(logits(back), logits(model))
