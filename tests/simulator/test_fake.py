from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator.fake import fake_mode, faked, to_fake


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


def own_tensors(module: nn.Module) -> dict[str, int]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: id(tensor) for name, tensor in named}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_tensor_becomes_a_fake_cpu_tensor(device: str) -> None:
    with torch.device(device):
        module = Tied()

    to_fake(module, fake_mode())

    tensors = [*module.parameters(), *module.buffers()]
    assert all(isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" for tensor in tensors)
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert module.norm.num_batches_tracked.dtype == torch.int64


def test_ties_and_frozen_weights_stay() -> None:
    module = to_fake(Tied(), fake_mode())

    assert module.head.weight is module.embedding.weight
    assert not module.head.bias.requires_grad
    assert module.head.weight.requires_grad


def test_strides_and_attributes_stay() -> None:
    module = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    module.weight.mark = "kept"
    strides = module.weight.stride()

    to_fake(module, fake_mode())

    assert module.weight.stride() == strides
    assert module.weight.mark == "kept"


def test_a_fake_module_stays_as_it_is() -> None:
    mode = fake_mode()
    module = to_fake(Tied(), mode)
    before = own_tensors(module)

    to_fake(module, mode)

    assert own_tensors(module) == before


def test_faked_gives_the_same_objects_back_untouched() -> None:
    module = Tied()
    before = own_tensors(module)
    mode = fake_mode()

    with faked(module, mode), mode:
        module(torch.zeros(3, dtype=torch.int64)).sum().backward()

    assert own_tensors(module) == before
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.norm.num_batches_tracked.item() == 0


def test_faked_gives_the_same_objects_back_after_an_exception() -> None:
    module = Tied()
    before = own_tensors(module)

    with pytest.raises(ZeroDivisionError), faked(module, fake_mode()):
        _ = 1 / 0

    assert own_tensors(module) == before


def test_a_step_on_a_fake_module_takes_real_tensors_too() -> None:
    module = to_fake(nn.Linear(4, 5), fake_mode())

    output = module(torch.zeros(3, 4))

    assert isinstance(output, FakeTensor)
    assert output.shape == (3, 5)


def test_what_a_forward_leaves_in_attributes_goes_and_what_was_there_comes_back() -> None:
    module = nn.utils.spectral_norm(nn.Linear(4, 5))
    weight, mode = module.weight, fake_mode()
    module.register_forward_hook(lambda module, _, output: setattr(module, "last", output))

    with faked(module, mode), mode:
        module(torch.empty(2, 4))
        assert isinstance(module.weight, FakeTensor)

    assert module.weight is weight
    assert not hasattr(module, "last")
