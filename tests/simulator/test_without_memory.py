"""Models built without memory: what is large is fake, and what authors do while building goes on as if it were real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator.fake import LARGEST_REAL_BYTES, fake_mode, without_memory

WIDE = 512  # a square of it is large, a row is small


def built(make: Callable[[], Any]) -> Any:
    with without_memory(fake_mode()):
        return make()


def wide(**settings: Any) -> nn.Linear:
    return nn.Linear(WIDE, WIDE, **settings)


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def test_small_tensors_are_real_and_large_ones_fake() -> None:
    rates, row, square, layer = built(
        lambda: (
            [rate.item() for rate in torch.linspace(0, 1, 3)],
            torch.full((LARGEST_REAL_BYTES // 4,), 2.0),
            torch.randn(LARGEST_REAL_BYTES // 4 + 1),
            wide(),
        )
    )

    assert rates == [0.0, 0.5, 1.0]
    assert row.sum() == LARGEST_REAL_BYTES // 2
    assert is_fake(square)
    assert is_fake(layer.weight)
    assert isinstance(layer.weight, nn.Parameter)
    assert not is_fake(layer.bias)


@pytest.mark.parametrize("real", [torch.ones(WIDE, WIDE, dtype=torch.bfloat16), torch.ones(2)])
def test_what_is_made_of_real_tensors_is_fake_where_it_is_large(real: Tensor) -> None:
    made = built(lambda: (real.float() * 2, real.view(-1), real.sum()))

    assert is_fake(made[0]) == (real.numel() > 2)
    assert not is_fake(made[1])
    assert made[2].item() == real.numel()


def test_moving_and_casting_keeps_the_parameters() -> None:
    def make() -> tuple[nn.Module, list[nn.Parameter]]:
        layer = nn.Sequential(wide(), nn.GELU(), wide())
        layer[2].weight = layer[0].weight
        parameters = list(layer.parameters())
        return layer.to(torch.float16).bfloat16().to("cpu"), parameters

    layer, parameters = built(make)

    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert layer[2].weight is layer[0].weight
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


def test_lazy_layers_get_their_shapes_from_a_batch() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(WIDE), nn.LazyLinear(2), nn.Unflatten(0, (1, -1)), nn.LazyBatchNorm1d())
        held = model[0].weight
        with torch.no_grad():
            model(torch.randn(LARGEST_REAL_BYTES, WIDE))
        assert model[0].weight is held
        return model

    model = built(make)

    assert is_fake(model[0].weight)
    assert is_fake(model[3].running_mean)
    assert not is_fake(model[1].weight)
    assert model[0].weight.shape == (WIDE, WIDE)
    assert model[0].weight.requires_grad
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_weights_are_initialised_moved_to_the_meta_device_and_back_and_trained() -> None:
    def make() -> nn.Linear:
        layer = wide(device="meta").to_empty(device="cpu")
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.orthogonal_(layer.weight)
        nn.utils.parametrizations.weight_norm(wide())
        optimizer = optim.AdamW(layer.parameters())
        layer(torch.randn(3, WIDE)).sum().backward()
        optimizer.step()
        return layer

    assert is_fake(built(make).weight)


def test_torch_is_as_it_was_afterwards() -> None:
    before = torch.utils.swap_tensors, nn.init._no_grad_trunc_normal_

    with pytest.raises(ZeroDivisionError):
        built(lambda: 1 / 0)

    assert (torch.utils.swap_tensors, nn.init._no_grad_trunc_normal_) == before
    assert not is_fake(wide().weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_checkpoints_are_loaded_without_their_values(tmp_path: Path, kind: str, assign: bool) -> None:
    state = wide(dtype=torch.bfloat16).state_dict()
    file = tmp_path / kind
    torch.save(state, file) if kind == "torch" else save_file(state, file)

    def make() -> nn.Linear:
        layer = wide(dtype=torch.bfloat16)
        layer.load_state_dict(torch.load(file) if kind == "torch" else load_file(file), assign=assign)
        return layer.float()

    layer = built(make)

    assert is_fake(layer.weight)
    assert layer.weight.dtype == layer.bias.dtype == torch.float32


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.numpy(), lambda x: x.nonzero()])
def test_values_of_large_tensors_cannot_be_had(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Exception, match=r"_local_scalar_dense|tensor subclasses|nonzero"):
        built(lambda: read(wide().weight.detach()))


def test_transformers_loads_and_casts_a_folder_without_its_values(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=192, num_hidden_layers=1, num_attention_heads=2, intermediate_size=384)
    ViTModel(config).to(torch.bfloat16).save_pretrained(tmp_path)

    model = built(lambda: ViTModel.from_pretrained(tmp_path, dtype=torch.float32))

    large = [weight for weight in model.parameters() if weight.nbytes > LARGEST_REAL_BYTES]
    assert len(large) > 6
    assert all(map(is_fake, large))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
