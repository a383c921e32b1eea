import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from actbench.methods.actnn.layers.relu import relu
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.methods.fewbit.tables import table
from actbench.simulator import fake

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def layer(bits=3, exact=None):
    return StepwiseActivation(exact or nn.GELU(), table("gelu", bits), "GELU")


def expected_gradient(x, grad, bits=3):
    """``grad * level[bucket]``, from the table alone."""
    found = table("gelu", bits)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bounds = torch.tensor(found.borders, dtype=torch.float32).to(wide)
    levels = torch.tensor(found.levels, dtype=torch.float32).to(wide)
    codes = (x.detach().to(wide).unsqueeze(-1) > bounds).sum(-1)
    return (grad.to(wide) * levels[codes]).to(grad.dtype)


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4, 5, 6),
    "channels_last": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4, 5, 6).transpose(0, 2),
    "sliced": lambda: torch.randn(3, 8, 5)[:, ::2],
    "expanded": lambda: torch.randn(3, 1, 5).expand(3, 4, 5),
    "one element": lambda: torch.randn(1, 1),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(4, 0),
}


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_exact_and_gradient_is_that_of_the_table(dtype, bits):
    x = (3 * torch.randn(7, 331)).to(dtype).requires_grad_()
    grad = torch.randn(7, 331).to(dtype)
    y = layer(bits)(x)
    y.backward(grad)

    assert torch.equal(y, nn.GELU()(x))
    assert torch.equal(x.grad, expected_gradient(x, grad, bits))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["like", "contiguous", "transposed"])
def test_any_layout(layout, grad_layout):
    x = LAYOUTS[layout]().requires_grad_()
    y = layer()(x)
    grad = torch.randn_like(y)
    if grad_layout == "contiguous":
        grad = grad.contiguous()
    elif grad_layout == "transposed":
        grad = grad.mT.contiguous().mT if grad.dim() > 1 else grad
    (found,) = torch.autograd.grad(y, x, grad)

    assert torch.equal(y, nn.GELU()(x))
    assert torch.equal(found, expected_gradient(x, grad))
    if layout in ("contiguous", "channels_last", "transposed"):
        assert found.stride() == x.stride()


def test_values_that_are_no_numbers():
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], requires_grad=True)
    y = layer()(x)
    y.backward(torch.ones(4))
    levels = table("gelu", 3).levels

    assert y.isnan().tolist() == nn.GELU()(x).isnan().tolist()
    assert x.grad.tolist() == pytest.approx([levels[0], levels[7], levels[0], levels[3]])


def saved(function):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = function()
    return kept, result


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 1001])
def test_kept_bytes_are_the_named_bits(bits, count):
    module = layer(bits)
    x = torch.randn(count, requires_grad=True)
    kept, _ = saved(lambda: module(x))
    own = [t for t in kept if t.untyped_storage().data_ptr() != module.levels.untyped_storage().data_ptr()]

    assert [(t.dtype, t.untyped_storage().nbytes()) for t in own] == [(torch.uint8, -(-count * bits // 8))]


def test_nothing_is_kept_where_no_gradient_is_needed():
    x = torch.randn(100, requires_grad=True)
    with torch.no_grad():
        assert saved(lambda: layer()(x))[0] == []
    assert saved(lambda: layer()(x.detach()))[0] == []
    assert layer()(x.detach()).grad_fn is None


def test_the_input_is_not_held():
    hidden = torch.randn(1000, requires_grad=True) * 2
    gone = weakref.ref(hidden)
    y = layer()(hidden)
    del hidden
    assert gone() is None
    assert y.grad_fn is not None


def test_retain_graph_gives_the_same_twice():
    x = torch.randn(10, requires_grad=True)
    y = layer()(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_one_layer_may_run_several_times_in_a_step():
    module = layer()
    a, b = torch.randn(2, 50).requires_grad_(), torch.randn(3, 7).requires_grad_()
    (module(a).sum() + module(b).sum()).backward()
    assert torch.equal(a.grad, expected_gradient(a, torch.ones_like(a)))
    assert torch.equal(b.grad, expected_gradient(b, torch.ones_like(b)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    model = nn.Sequential(nn.Linear(8, 16), layer(), nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    exact = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    model = nn.Sequential(exact[0], layer())
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype):
        y = model(x)
        assert y.dtype == dtype
        assert torch.equal(y, exact(x))
    y.sum().backward()
    assert exact[0].weight.grad.dtype == torch.float32


def test_a_gradient_of_another_type_comes_back_in_the_type_of_the_input():
    class Widening(nn.Module):  # as a power under CUDA's autocast
        def forward(self, x):
            return nn.functional.gelu(x.float())

    x = torch.randn(50).half().requires_grad_()
    grad = torch.randn(50)
    y = layer(exact=Widening())(x)
    y.backward(grad)
    assert y.dtype == torch.float32
    assert torch.equal(x.grad, expected_gradient(x, grad).half())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), layer(), nn.Linear(16, 4))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = torch.randn(5, 8)
    for run in (model, compiled):
        run(x).sum().backward()
    assert torch.equal(model(x), compiled(x))
    twin = dict(compiled.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, twin[f"_orig_mod.{name}"].grad)


def test_hooks_and_flags_are_those_of_the_replaced_layer_and_run_once():
    exact = nn.GELU().eval()
    calls = []
    exact.register_forward_hook(lambda *_: calls.append("forward"))
    exact.register_forward_pre_hook(lambda *_: calls.append("before"))
    exact.register_full_backward_hook(lambda *_: calls.append("backward"))
    module = layer(exact=exact)
    x = torch.randn(4, requires_grad=True)
    module(x).sum().backward()

    assert calls == ["before", "forward", "backward"]
    assert not module.training
    calls.clear()
    module.exact(x)
    assert calls == []
    exact(x)
    assert calls == ["before", "forward"]


def test_state_dict_copies_and_name():
    module = layer()
    assert module.state_dict() == {}
    assert repr(module) == "StepwiseActivation(3-bit GELU)"
    twin = copy.deepcopy(module)
    assert torch.equal(twin.levels, module.levels)
    assert twin.levels is not module.levels


def test_the_constants_stay_float32_and_survive_the_meta_device():
    module = layer()
    bounds, levels = module.bounds.clone(), module.levels.clone()
    for changed in (module.half(), module.double(), module.bfloat16(), module.to("meta").to_empty(device="cpu")):
        assert changed.levels.dtype == torch.float32
        assert torch.equal(changed.levels, levels)
        assert torch.equal(changed.bounds, bounds)


@pytest.mark.parametrize("convert_first", [False, True])
def test_on_fake_tensors_it_keeps_the_same_bytes(convert_first):
    mode = fake.fake_mode()
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    if convert_first:
        plain[1] = layer()
    model = fake.to_fake(plain, mode)
    if not convert_first:
        model[1] = StepwiseActivation(model[1], table("gelu", 3), "GELU", model[0].weight)
    with mode:
        kept, y = saved(lambda: model(torch.randn(5, 8)))
        y.sum().backward()
    assert [t.numel() for t in kept if t.dtype == torch.uint8] == [5 * 16 * 3 // 8]
    assert model[0].weight.grad.shape == (16, 8)


@pytest.mark.parametrize("module", [layer(), relu], ids=["layer", "relu"])
def test_codes_that_are_recomputed_of_another_layout_are_refused(module):
    """Torch's ``save_on_cpu`` may bring a tensor back in another order of memory."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.contiguous(), lambda kept: kept):
        y = checkpoint(lambda t: module(t * 1), x, use_reentrant=False)

    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


def test_a_table_for_relu_is_not_left_aside():
    steps = table("gelu", 3)
    x, grad = torch.randn(300, requires_grad=True), torch.randn(300)
    (found,) = torch.autograd.grad(StepwiseActivation(nn.ReLU(), steps, "layer")(x), x, grad)

    levels = torch.tensor(steps.levels)[torch.searchsorted(torch.tensor(steps.borders), x.detach())]
    assert torch.equal(found, grad * levels)
