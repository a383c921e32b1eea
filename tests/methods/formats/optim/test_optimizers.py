"""Packed optimizers beside torch's: exact state is torch's bits, packed state is near, and bytes are the formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import optim
from actbench.errors import UsageError
from actbench.methods.formats.ops.smaq.format import SMAQ
from actbench.methods.formats.optim.storage import storage_of

ENCODINGS = ("smaq", "smaq,outlier_bits=8", "smaq,block=1024", "int:6", "int:8,group_size=256", "bf16", "fp8:e4m3")
OPTIMIZERS = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD dampened": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "SGD without momentum": (optim.SGD, torch.optim.SGD, {"lr": 1e-2}),
}


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    """Return a matrix that is packed, a small one, and a long vector."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((80, 70), (8, 8), (5000,))]


def stepped(optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> list[torch.Tensor]:
    """Step on gradients that depend on the number of the step; return the parameters."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in held:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in held]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_parameters_and_vectors_are_stepped_as_in_torch(name: str) -> None:
    ours, theirs, options = OPTIMIZERS[name]
    found, expected = stepped(ours(parameters(), **options)), stepped(theirs(parameters(), **options))
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_an_encoding_all_are_torchs_bits(name: str) -> None:
    ours, theirs, options = OPTIMIZERS[name]
    found = stepped(ours(parameters(), **options, encoding=None))
    expected = stepped(theirs(parameters(), **options))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step_of_a_packed_parameter_is_torchs(name: str, encoding: str) -> None:
    """State is rounded after it was used."""
    ours, theirs, options = OPTIMIZERS[name]
    found = stepped(ours(parameters(), **options, encoding=encoding), steps=1)
    expected = stepped(theirs(parameters(), **options), steps=1)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_of_state_are_the_formula(encoding: str) -> None:
    optimizer = optim.AdamW(parameters(), encoding=encoding)
    stepped(optimizer, steps=2)
    matrix, *others = (optimizer.state[p] for p in optimizer.param_groups[0]["params"])
    packed = [value for name, value in matrix.items() if name != "step"]
    assert [value.numel() for value in packed] == [storage_of(encoding).packed_bytes(80 * 70)] * 2
    assert all(value.dtype == torch.uint8 for value in packed)
    assert all(value.dtype == torch.float32 for state in others for value in state.values())


def test_bytes_of_the_usual_form_by_hand() -> None:
    whole, left = divmod(80 * 70, 256)
    last = 8 + left * 6 // 8 + left // 4 // 8  # 224 elements are whole eights
    assert storage_of("smaq").packed_bytes(80 * 70) == whole * 208 + last
    assert storage_of("smaq").packed_bytes(2**20) * 2 / 2**20 == 1.625


@pytest.mark.parametrize("encoding", ["smaq", "int:6,rounding=stochastic", "bf16,rounding=stochastic"])
def test_stored_moments_stay_near_those_of_torch(encoding: str) -> None:
    ours = optim.AdamW(parameters(), encoding=encoding)
    theirs = torch.optim.AdamW(parameters())
    stepped(ours, 20)
    stepped(theirs, 20)
    state = ours.state[ours.param_groups[0]["params"][0]]
    exact = theirs.state[theirs.param_groups[0]["params"][0]]
    unpacked = {name: storage_of(encoding).unpack(state[name], 80 * 70) for name in state if name != "step"}
    for found, expected in (
        (unpacked["packed_exp_avg"], exact["exp_avg"].flatten()),
        (unpacked["packed_root_exp_avg_sq"], exact["exp_avg_sq"].flatten().sqrt()),
    ):
        assert (found - expected).square().mean() < 0.02 * expected.square().mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_types_are_stepped_in_float32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    ours, theirs, options = OPTIMIZERS[name]
    found = stepped(ours(parameters(dtype), **options), steps=1)
    wide = [nn.Parameter(parameter.detach().float()) for parameter in parameters(dtype)]
    optimizer = theirs(wide, **options)
    generator = torch.Generator().manual_seed(100)
    for parameter in wide:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype).float()
    optimizer.step()
    for one, other in zip(found, wide, strict=True):
        spacing = torch.finfo(dtype).eps * other.detach().abs()
        assert ((one.float() - other.detach()).abs() <= 0.51 * spacing + 1e-6).all()


@pytest.mark.parametrize("encoding", ["smaq", "int:6", None])
def test_the_order_of_elements_in_memory_changes_nothing(encoding: str | None) -> None:
    start, results = torch.randn(16, 8, 3, 16), []
    for layout in (torch.contiguous_format, torch.channels_last):
        parameter = nn.Parameter(start.clone(memory_format=layout))
        results.append(stepped(optim.AdamW([parameter], encoding=encoding))[0].contiguous())
    assert torch.equal(*results)


def test_noise_differs_between_parameters_steps_and_seeds_and_not_between_runs() -> None:
    def state_after(steps: int, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        same = torch.randn(64, 64)
        held = [nn.Parameter(same.clone()) for _ in range(2)]
        optimizer = optim.SGD(held, lr=0.0, momentum=0.9, seed=seed)
        for _ in range(steps):
            for parameter in held:
                parameter.grad = same.clone()
            optimizer.step()
        return [optimizer.state[p]["packed_momentum_buffer"] for p in held]

    first, second = state_after(1, seed=0)
    assert not torch.equal(first, second)
    assert torch.equal(first, state_after(1, seed=0)[0])
    assert not torch.equal(first, state_after(1, seed=1)[0])


def test_groups_closures_schedulers_and_versions() -> None:
    matrix, other = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
    optimizer = optim.AdamW([{"params": [matrix], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [other], "encoding": "int:6", "weight_decay": 0.0})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    assert [group["encoding"] for group in optimizer.param_groups] == ["smaq", "int:6"]
    before = matrix._version

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = matrix.square().sum() + other.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    assert matrix._version > before
    int6 = optimizer.state[other]["packed_exp_avg"]
    assert int6.numel() == 64 * 64 * 6 // 8 + 4 * 64 * 64 // 64
    assert optimizer.state[matrix]["packed_exp_avg"].numel() == SMAQ.packed_bytes(64 * 64)


def test_a_change_of_a_parameter_is_seen_by_a_graph_that_has_saved_it() -> None:
    parameter = nn.Parameter(torch.randn(64, 64))
    loss = (parameter.square() * 2).sum()
    stepped(optim.SGD([parameter], momentum=0.9), steps=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_options_and_parameters_are_refused() -> None:
    matrix = nn.Parameter(torch.randn(64, 64))
    sparse = nn.Embedding(100, 64, sparse=True)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW([matrix], lr=-1.0)
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGD([matrix], nesterov=True)
    with pytest.raises(UsageError, match="no encoding 'smak'; did you mean 'smaq'"):
        optim.AdamW([matrix], encoding="smak")
    with pytest.raises(UsageError, match="'smaq_simulated': this format only simulates"):
        optim.AdamW([matrix], encoding="smaq_simulated")
    with pytest.raises(UsageError, match="'nnwbdi': its bytes depend on the values"):
        optim.AdamW([matrix], encoding="nnwbdi")
    with pytest.raises(UsageError, match=r"a parameter is torch\.float64"):
        optim.AdamW([matrix.double().detach().requires_grad_()])
    with pytest.raises(UsageError, match=r"a parameter is torch\.complex64"):
        optim.SGD([nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))])
    optimizer = optim.SGD(sparse.parameters(), momentum=0.9)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="parameter 0 has a sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("encoding", [*ENCODINGS, "smaq,rounding=nearest", "fp8:e4m3,scale=none", "s2fp8"])
@pytest.mark.parametrize("of", ["half of the elements", "some rows, later", "large and small ones"])
def test_no_root_is_decoded_to_next_to_nothing_where_a_first_moment_is_not(encoding: str, of: str) -> None:
    """A first moment that was divided by it would throw its parameter away; Adam's steps are about the rate."""
    generator, rate, shape = torch.Generator().manual_seed(0), 1e-3, (64, 96)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = optim.AdamW([parameter], lr=rate, weight_decay=0.0, encoding=encoding)
    alive = torch.rand(shape, generator=generator) < 0.5
    sizes = torch.exp2(-torch.randint(12, shape, generator=generator).float())
    for step in range(15):
        before = parameter.detach().clone()
        rows = (torch.rand(64, 1, generator=generator) < 0.1) | (step <= 5)
        scale = {"half of the elements": alive, "some rows, later": rows, "large and small ones": sizes}[of]
        parameter.grad = torch.randn(shape, generator=generator) * scale
        optimizer.step()
        assert (parameter.detach() - before).abs().max() < 10 * rate
