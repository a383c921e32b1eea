"""Low-bit Adam on DTensors, as FSDP2 makes them: each process steps its share as if that were a whole parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from actbench.measuring.bench import measure
from actbench.methods.lowbit.lowbitadam import few_bits_adam
from actbench.model.records import Case
from actbench.workload import load_workload


@pytest.mark.parametrize("suffix", ["8bit", "4bit", "Fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_share_steps_as_a_whole_parameter_does(
    mesh: DeviceMesh, suffix: str, dtype: torch.dtype, by_closure: bool
) -> None:
    torch.manual_seed(0)
    values = [torch.randn(64, 128), torch.randn(8)]  # moments of the second are not of few bits
    whole = [nn.Parameter(each.to(dtype, copy=True)) for each in values]
    shares = [nn.Parameter(distribute_tensor(each.to(dtype), mesh, [Shard(0)])) for each in values]
    unused = nn.Parameter(distribute_tensor(torch.ones(4, dtype=dtype), mesh, [Shard(0)]))
    plain = nn.Parameter(whole[0].detach().clone())  # beside shares, as norms are if linear layers alone are spread
    make = few_bits_adam("adam", suffix)
    of_whole, of_shares = make(optim.AdamW(whole, lr=0.1)), make(optim.AdamW([plain, *shares, unused], lr=0.1))

    for _ in range(3):
        gradients = [torch.randn_like(each) for each in whole]

        def backward(gradients: list[torch.Tensor] = gradients) -> float:
            for one, share, gradient in zip(whole, shares, gradients, strict=True):
                one.grad, share.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
            plain.grad = gradients[0].clone()
            return 1.5

        if by_closure:
            assert of_shares.step(backward) == 1.5
        else:
            backward()
            of_shares.step()
        of_whole.step()

    for one, share, value in zip(whole, shares, values, strict=True):
        assert torch.equal(one, share.full_tensor())  # type: ignore[attr-defined]
        assert not torch.equal(one, value.to(dtype))
        assert isinstance(of_shares.state[share]["exp_avg"], DTensor)
        assert of_shares.state[share]["step"] == 3
    assert torch.equal(plain, whole[0])
    assert of_shares.state.keys() == {plain, *shares}
    assert of_shares.param_groups[0]["params"][-1] is unused


@pytest.mark.parametrize("release", ["", "+release"])
def test_one_kernel_for_each_share_is_simulated_for_cuda(release: str) -> None:
    base = Case(model="tiny-llama", batch_size=2, sequence_length=32, dtype="bfloat16", device_profile="h100-80gb")

    found = measure(base.model_copy(update={"meter": "simulated", "scheme": f"adam4bit{release}+fsdp:2"}))

    assert found.estimated is not None
    kernels = {each.name: each for each in found.estimated.by_operator}["one_kernel"]
    assert kernels.calls == len(list(load_workload(base).setup(materialize=False, seed=0).module.parameters()))
