"""Formats of frozen weights: their bytes, their error, and what layers compute with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adaptedmodels import Net, batch, built, setup_of
from torch import nn

from actbench import base_state_dict, scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import bench
from actbench.methods.lora.frozenformats import FROZEN_FORMATS, FrozenFormat
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.model.records import Case

BYTES = {
    "nf4_single": 256 * 384 // 2 + 4 * 256 * 384 // 64,
    "int8": 256 * 384 + 4 * 256,
    "gptq": 256 * 384 // 2 + 3 * 256 * (2 + 0.5) + 4 * 384,
    "awq": 256 * 384 // 2 + 3 * 256 * (2 + 0.5),
}
"""Of a matrix with 384 inputs, three groups of 128, and 256 outputs."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", BYTES)
def test_parts_have_the_bytes_of_their_library_and_values_are_within_half_a_step(name: FrozenFormat) -> None:
    matrix, encoding = torch.randn(256, 384), FROZEN_FORMATS[name]
    parts = encoding.encode(matrix, torch.tensor(0))

    assert sum(part.nbytes for part in parts) == BYTES[name] == encoding.packed_bytes(matrix.shape, matrix.dtype)
    assert not any(part.is_floating_point() for part in parts)  # model.half() leaves them alone
    found = encoding.decode(parts, matrix.shape, torch.float32)
    if name == "int8":
        half_step = matrix.abs().amax(1, keepdim=True) / 254
    elif name == "nf4_single":  # the two widest levels are 0.304 of the scale apart
        half_step = matrix.view(256, 6, 64).abs().amax(-1, keepdim=True).expand(-1, -1, 64).reshape(256, 384) * 0.152
    else:
        groups = matrix.view(256, 3, 128)
        ranges = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
        half_step = (ranges / 30 * 1.02).expand(-1, -1, 128).reshape(256, 384)  # scales are rounded to float16
    assert bool(((found - matrix).abs() <= half_step + 1e-6).all())


def test_one_group_of_all_inputs_has_one_scale_for_each_output() -> None:
    module: Any = schemes.build("qlora:4,weights=gptq,group=0").apply(setup_of(Net())).module
    layers = [part for part in module.modules() if isinstance(part, FrozenLinear)]

    assert layers
    for layer in layers:
        codes, _, scales, _ = layer.packed_weight
        assert codes.nbytes == layer.out_features * layer.in_features // 2
        assert scales.shape == (1, layer.out_features)


@pytest.mark.parametrize("name", ["int8", "gptq", "awq"])
def test_a_matrix_of_the_format_s_own_values_comes_back(name: FrozenFormat) -> None:
    encoding = FROZEN_FORMATS[name]
    values = torch.randint(-127, 128, (16, 128)) if name == "int8" else torch.randint(-5, 11, (16, 128))
    values[:, 0], values[:, 1] = (127, -127) if name == "int8" else (10, -5)
    matrix = values * 0.25

    assert torch.equal(encoding.decode(encoding.encode(matrix, torch.tensor(0)), (16, 128), torch.float32), matrix)


@pytest.mark.parametrize("name", ["nf4", "nf4_single", "gptq"])
def test_codes_in_the_model_s_type_are_the_same_bits(name: str) -> None:
    def packed(storage: str) -> Any:
        torch.manual_seed(0)
        return schemes.build(f"qlora:4,weights={name}{storage}").apply(built(dtype="bfloat16")).module

    own, flat = packed(""), packed(",storage=model")
    given, types = batch(dtype="bfloat16"), {parameter.dtype for parameter in flat.parameters()}
    losses = [model(**given).loss for model in (own, flat)]
    for loss in losses:
        loss.backward()

    assert types == {torch.bfloat16, torch.float32}  # the adapters
    assert torch.equal(*losses)
    grads = [[p.grad for p in model.parameters() if p.grad is not None] for model in (own, flat)]
    assert len(grads[0]) == len(grads[1])
    assert all(map(torch.equal, *grads))
    weights, same = (base_state_dict(model) for model in (own, flat))
    assert all(torch.equal(weights[key], same[key]) for key in weights.keys() | same.keys())
    assert flat.state_dict().keys() != own.state_dict().keys()
    with pytest.raises(ConversionError, match=r"codes stored as torch.bfloat16 were cast to torch.float16"):
        flat.half()(**given)


@pytest.mark.parametrize("name", BYTES)
def test_a_layer_computes_with_the_rounded_weight_and_gives_gradients_through_it(name: str) -> None:
    model: Any = schemes.build(f"qlora:4,weights={name}").apply(setup_of(Net())).module
    layer, x = model.first.base_layer, torch.randn(8, 128, requires_grad=True)

    found, expected = layer(x), nn.functional.linear(x, layer.weight, layer.bias)

    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "spec",
    ["qlora:4,weights=gptq", *(f"qlora:4,weights={name}" for name in BYTES)],
)
def test_the_simulated_peak_is_that_of_the_allocator(spec: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    measured = bench.Session(Case(**fields, scheme=spec, meter="cpu")).memory()
    simulated = bench.Session(Case(**fields, scheme=spec, meter="simulated", device_profile="cpu")).memory()

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    assert simulated.weights_bytes == measured.weights_bytes


def test_prepared_models_hold_all_else_in_float32_and_multiply_in_halves() -> None:
    model: Any = schemes.build("qlora:4,prepared=true").apply(built(dtype="bfloat16")).module
    seen: list[torch.dtype] = []
    layers = [part for part in model.modules() if isinstance(part, FrozenLinear)]
    for layer in layers:
        decode = layer.encoding.decode
        layer.encoding = _Watched(decode, seen)
    loss = model(**batch(dtype="bfloat16")).loss
    loss.backward()

    floats = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    assert set(floats.values()) == {torch.float32}
    assert any("norm" in name for name in floats)
    assert any("embed" in name for name in floats)
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 2 * len(layers) - 3  # once in each pass; nothing before the first q, k and v is trained
    assert loss.dtype == torch.float32


class _Watched:
    """A format that notes the types it is unpacked to."""

    def __init__(self, decode: Any, seen: list[torch.dtype]) -> None:
        self._decode, self._seen = decode, seen

    def decode(self, parts: Any, shape: Any, dtype: torch.dtype) -> Any:
        self._seen.append(dtype)
        return self._decode(parts, shape, dtype)


def test_widths_that_a_library_does_not_store_are_refused_and_nothing_is_changed() -> None:
    module = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16))

    with pytest.raises(ConversionError, match="multiples of 8; 0 is 16 x 12"):
        schemes.build("qlora:4,weights=awq").apply(setup_of(module))
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_and_large_halves_come_back_within_a_step_and_a_rounding(dtype: torch.dtype) -> None:
    encoding = FROZEN_FORMATS["int8"]
    for size in (1e-6, 1.0, 6e4):
        matrix = (torch.rand(32, 64) * 2 - 1).mul_(size).to(dtype)
        found = encoding.decode(encoding.encode(matrix, torch.tensor(0)), matrix.shape, dtype)

        largest = matrix.abs().amax(1, keepdim=True).float()
        spacing = torch.finfo(dtype).eps * largest + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert bool(((found - matrix).float().abs() <= largest / 254 + 2 * spacing).all())
