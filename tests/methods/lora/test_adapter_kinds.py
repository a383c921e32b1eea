"""Adapters of other kinds than LoRA's: what each computes, trains and saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptedmodels import Net, batch, built, setup_of, trained
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.measuring import bench
from actbench.model.records import Case
from actbench.testing import check_scheme

KINDS = ("dora", "lora_fa", "vera", "lokr")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _expected(kind: str, layer: Any, x: Tensor) -> Tensor:
    """Return what the paper's formula gives, from the layer's parameters; s is 2."""
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    if kind == "vera":
        a, b = layer.vera_A["default"][:, : x.shape[-1]], layer.vera_B["default"][: weight.shape[0]]
        outer, inner = layer.vera_lambda_b["default"], layer.vera_lambda_d["default"]
        return x @ weight.t() + bias + outer * ((inner * (x @ a.t())) @ b.t())
    if kind == "lokr":
        w1, w2 = layer.lokr_w1["default"], layer.lokr_w2_a["default"] @ layer.lokr_w2_b["default"]
        return x @ (weight + 2 * torch.kron(w1, w2)).t() + bias
    delta = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    if kind == "dora":
        magnitudes = layer.lora_magnitude_vector["default"].weight
        norms = (weight + delta).norm(dim=1).detach()
        return x @ ((magnitudes / norms)[:, None] * (weight + delta)).t() + bias
    return x @ (weight + delta).t() + bias


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_its_paper_s_formula_and_has_its_gradients(kind: str) -> None:
    model: Any = schemes.build(f"lora:4,adapter={kind}").apply(setup_of(Net())).module
    layer, x = model.first, torch.randn(8, 128, requires_grad=True)
    torch.testing.assert_close(layer(x), layer.base_layer(x), msg="it begins as the layer alone")
    wanted = [p for p in layer.parameters() if p.requires_grad]
    for parameter in wanted:
        nn.init.normal_(parameter)

    found, expected = layer(x), _expected(kind, layer, x)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((each * weights).sum(), [x, *wanted]) for each in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("dora", 2 * 4 * (128 + 256) + 256 + 128),
        ("lora_fa", 4 * (128 + 256)),
        ("vera", 256 + 128 + 2 * 4),
        ("lokr", 2 * (8 * 16 + 4 * (16 + 16))),  # 128 is 8 x 16 and 256 is 16 x 16
    ],
)
def test_trained_are_as_many_numbers_as_the_formula_says(kind: str, count: int) -> None:
    model = schemes.build(f"lora:4,adapter={kind}").apply(setup_of(Net())).module

    numbers = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    head = (
        numbers.pop("classifier.modules_to_save.default.weight"),
        numbers.pop("classifier.modules_to_save.default.bias"),
    )
    assert head == (1280, 10)
    assert sum(numbers.values()) == count


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("qlora:4,adapter=vera", "float32"),
        ("lora:4,adapter=dora", "model"),
        *((f"lora:4,adapter={kind}", dtype) for kind in ("lora_fa", "vera", "lokr") for dtype in ("float32", "model")),
    ],
)
def test_a_simulation_makes_the_same_parameters(spec: str, dtype: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 2, "sequence_length": 16, "dtype": "bfloat16"}
    spec = f"{spec},dtype={dtype},modules_to_save=embed_tokens"
    real = bench.Session(Case(**fields, scheme=spec, meter="cpu")).setup.module
    fake = bench.Session(Case(**fields, scheme=spec)).setup.module

    found, expected = (
        {name: (p.shape, p.dtype, p.requires_grad) for name, p in [*each.named_parameters(), *each.named_buffers()]}
        for each in (fake, real)
    )
    assert found == expected
    types = {p.dtype for name, p in real.named_parameters() if p.requires_grad and "modules_to_save" not in name}
    assert types == {torch.bfloat16 if dtype == "model" else torch.float32}
    saved = real.get_parameter("model.embed_tokens.modules_to_save.default.weight")
    assert saved.requires_grad
    assert saved.dtype == torch.bfloat16


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "spec", [f"lora:8,adapter={kind}" for kind in KINDS if kind != "dora"]
    + ["lora:8,adapter=dora", "lora:8,modules_to_save=embed_tokens"]
)  # fmt: skip
def test_the_simulated_peak_is_that_of_the_allocator(spec: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    measured = bench.Session(Case(**fields, scheme=spec, meter="cpu")).memory()
    simulated = bench.Session(Case(**fields, scheme=spec, meter="simulated", device_profile="cpu")).memory()

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    assert simulated.weights_bytes == measured.weights_bytes
    assert simulated.gradients_bytes == measured.gradients_bytes
    assert simulated.optimizer_bytes == measured.optimizer_bytes


@pytest.mark.slow
def test_a_frozen_projection_saves_no_inputs_and_the_model_s_type_saves_half() -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "dtype": "bfloat16"}

    def saved(spec: str) -> int:
        memory = bench.Session(Case(**fields, scheme=spec, gradient_quality=False)).memory()
        assert memory.activation_bytes is not None
        return memory.activation_bytes

    plain, frozen, own = (saved(f"lora:4,{option}") for option in ("alpha=8", "adapter=lora_fa", "dtype=model"))

    # tiny-llama has two blocks; q, k and v share an input, and so do gate and up; 4 x 64 tokens
    inputs = 2 * 256 * (3 * 64 + 256)  # numbers
    assert plain - frozen >= 4 * inputs
    assert plain - own >= 2 * inputs


@pytest.mark.filterwarnings(
    "ignore:Specified to not:UserWarning"
)  # peft says at each loading that a seed gives A and B
@pytest.mark.parametrize("kind", ["dora", "vera", "lokr"])
def test_saved_adapters_load_into_the_plain_model(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain, given = built().module, batch()
    model: Any = actbench.convert(built().module, f"lora:4,adapter={kind}")
    for name, parameter in model.named_parameters():
        if name in trained(model):
            nn.init.normal_(parameter, std=0.05)
    plain.load_state_dict(actbench.base_state_dict(model))
    model.save_pretrained(tmp_path)

    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()

    with torch.no_grad():
        torch.testing.assert_close(loaded(**given).logits, model.eval()(**given).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "spec", [*(f"lora:4,adapter={kind}" for kind in KINDS), "qlora:4,adapter=dora", "qlora:4,weights=int8"]
)
def test_the_contract_of_schemes_holds(spec: str) -> None:
    check_scheme(spec, on="tiny-llama" if "lokr" in spec else "tiny-gpt2")


def test_magnitudes_are_not_cut_among_processes() -> None:
    with pytest.raises(ConversionError, match="has adapters that are not LoRA's"):
        bench.measure(Case(model="tiny-llama", batch_size=2, sequence_length=16, scheme="lora:4,adapter=dora+tp:2"))


def test_the_magnitudes_over_4_bits_are_the_norms_of_the_rounded_rows() -> None:
    model: Any = schemes.build("qlora:4,adapter=dora").apply(setup_of(Net())).module
    x = torch.randn(8, 128)

    torch.testing.assert_close(model.first(x), model.first.base_layer(x))


@pytest.mark.parametrize("options", ["", ",dtype=model"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_dora_on_a_half_model_begins_as_the_model(name: str, options: str) -> None:
    given = batch(name, dtype="bfloat16")
    with torch.no_grad():
        wanted = built(name, dtype="bfloat16").module.eval()(**given).logits
        model = schemes.build(f"lora:4,adapter=dora{options}").apply(built(name, dtype="bfloat16")).module.eval()

        assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lora,adapter=vera,alpha=4", "adapter=vera has no alpha"),
        ("lora,adapter=lokr,dropout=0.1", "adapter=lokr has no dropout"),
        ("lora,adapter=ia3", "adapter=ia3"),
        ("lora,modules_to_save=a//b", "names of modules stand between"),
        ("qlora,adapter=lokr", "adapter=lokr is for whole weights"),
        ("qlora,prepared=true,only=layers.0", "prepared=true casts the whole model: .* leave out only=, or prepared"),
        ("qlora,weights=gptq,prepared=true", "peft leaves a model of weights=gptq as it is"),
    ],
)
def test_wrong_specifications_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        schemes.build(text)


def test_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(NothingToConvertError, match="modules_to_save=embedding names no module of Net"):
        schemes.build("lora,modules_to_save=embedding").apply(setup_of(Net()))


def test_layers_that_peft_has_no_such_adapter_for_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"peft puts it on nn\.Linear"):
        schemes.build("lora,adapter=lokr").apply(built("tiny-gpt2"))
