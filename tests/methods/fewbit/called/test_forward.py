"""A function that is called keeps what its layer keeps, and has its gradient; what is not to be reached is not."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.fewbit.called.functions import FUNCTIONS
from actbench.methods.fewbit.inverted import InvertedActivation
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.packing.forwardwrapper import ReboundForward
from actbench.scheme.setup import TrainingSetup

SETTINGS = {
    "approximate": "tanh",
    "alpha": 0.7,
    "beta": 2.0,
    "negative_slope": 0.2,
    "min_val": -0.5,
    "max_val": 0.8,
    "lambd": 0.3,
    "threshold": 0.1,
    "value": 0.4,
}
INVERTED = [function for function, called in FUNCTIONS.items() if called.kind in (nn.GELU, nn.SiLU)]


class Calls(nn.Module):
    """Calls a function, on a tensor that it makes, so that it may be overwritten."""

    def __init__(self, function, **settings):
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, x):
        return self.function(x * 1, **self.settings)


class Holds(nn.Module):
    """Runs a layer in the same place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x * 1)


def convert(module, spec="fewbit:3"):
    return schemes.build(spec).apply(TrainingSetup(module)).module


def saved_and_gradient(module, x):
    """Return output, gradient, and the shapes and types of what is saved."""
    kept = []
    torch.manual_seed(0)
    x = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, t.shape)) or t, lambda t: t):
        y = module(x)
    y.backward(torch.randn_like(y))
    return y, x.grad, kept


def same(one, other, x):
    for found, expected in zip(saved_and_gradient(one, x), saved_and_gradient(other, x), strict=True):
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
        else:
            assert found == expected


def pairs(functions):
    """Return each function with the arguments that it may have, and the layer that it is."""
    found = []
    for function in functions:
        called = FUNCTIONS[function]
        names = [name for name in (*called.parameters, *called.named) if name != "inplace"]
        choices = [{}] if called.kind is not nn.Threshold else []
        choices += [{name: SETTINGS[name] for name in names}] if names else []
        choices += [{**choice, "inplace": True} for choice in choices[:1] if "inplace" in called.parameters]
        for settings in choices:
            named = f"{called.name} {' '.join(map(str, settings.values()))}"
            found.append(pytest.param(function, settings, called.kind(**settings, **dict(called.fixed)), id=named))
    return found


LAYOUTS = {
    "contiguous": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)) * 3,
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "numbers": torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -3.0, 3.0]),
}


@pytest.mark.parametrize("layout", ["contiguous", "numbers"])
@pytest.mark.parametrize(("function", "settings", "layer"), pairs(FUNCTIONS))
def test_a_call_keeps_what_the_layer_keeps(function, settings, layer, layout):
    called, held = convert(Calls(function, **settings)), convert(Holds(layer))
    assert isinstance(held.layer, StepwiseActivation)

    same(called, held, LAYOUTS[layout])
    assert torch.uint8 in [dtype for dtype, _ in saved_and_gradient(called, LAYOUTS[layout])[2]]


@pytest.mark.parametrize(("function", "settings", "layer"), pairs([F.gelu, F.relu, F.softplus]))
def test_a_call_keeps_the_order_of_dimensions(function, settings, layer):
    same(convert(Calls(function, **settings)), convert(Holds(layer)), LAYOUTS["channels_last"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("function", "settings", "layer"), pairs([F.gelu, torch.tanh, torch.Tensor.relu, F.softplus]))
def test_in_every_type(function, settings, layer, dtype):
    same(convert(Calls(function, **settings)), convert(Holds(layer)), LAYOUTS["contiguous"].to(dtype))


@pytest.mark.parametrize(("function", "settings", "layer"), pairs(INVERTED))
def test_invact_keeps_the_output_of_a_call(function, settings, layer):
    called, held = convert(Calls(function, **settings), "invact"), convert(Holds(layer), "invact")
    assert isinstance(held.layer, InvertedActivation)

    same(called, held, LAYOUTS["contiguous"])


@pytest.mark.parametrize(
    ("spec", "function", "layer"), [("regelu2", F.gelu, nn.GELU()), ("resilu2", F.silu, nn.SiLU())]
)
def test_sums_of_relus_stand_in_for_calls(spec, function, layer):
    same(convert(Calls(function), spec), convert(Holds(layer), spec), LAYOUTS["contiguous"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    class Net(nn.Module):
        def __init__(self, activation):
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.narrow, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation

        def forward(self, x):
            return self.narrow(self.activation(self.wide(x)))

    def step(model):
        with torch.autocast("cpu", dtype):
            y = model(torch.ones(5, 8))
        y.float().square().sum().backward()
        return [y, *(p.grad for p in model.parameters())]

    for one, other in zip(step(convert(Net(F.gelu))), step(convert(Net(nn.GELU()))), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(torch.sigmoid_, id="no layer works in place"),
        pytest.param(lambda x: torch.tanh(x, out=None), id="out"),
        pytest.param(lambda x: F.gelu(x.detach()) * x, id="no gradient"),
        pytest.param(lambda x: torch.tanh(torch.complex(x, x)).real, id="complex"),
    ],
)
def test_what_no_layer_does_stays(function):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))  # so that it is no layer without tensors, which is told by numbers

        def forward(self, x):
            return function(x * self.one)

    class Also(nn.Module):
        def forward(self, x):
            return F.tanh(x)

    exact = nn.Sequential(Net(), Also())
    same(convert(copy.deepcopy(exact))[0], exact[0], LAYOUTS["contiguous"])


def test_nothing_is_kept_without_gradients():
    model = convert(Calls(F.gelu))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.ones(4))
        with torch.no_grad():
            model(torch.ones(4, requires_grad=True))
    assert kept == []


def test_a_view_is_overwritten_as_by_the_layer():
    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = x * 1
            self.inner(x[:, :3])
            return x.square()

    layer = nn.ReLU(inplace=True)
    for function in (torch.relu_, torch.Tensor.relu_, functools.partial(F.relu, inplace=True)):
        same(convert(Half(function)), convert(Half(copy.deepcopy(layer))), LAYOUTS["contiguous"])


def test_what_invact_leaves_for_a_reason_is_not_reached_by_its_function():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.GELU(), nn.ReLU(inplace=True))

        def forward(self, x):
            return F.gelu(self.part(x))

    setup = schemes.build("invact").apply(TrainingSetup(Net()))
    x = torch.randn(9, requires_grad=True)
    setup.module(x).sum().backward()

    assert [site.was for site in setup.sites] == ["call of F.gelu"]
    assert [left.path for left in setup.unreached] == ["part.0"]
    assert x.grad.isfinite().all()


def test_functions_narrow_calls_and_their_forms():
    class Net(nn.Module):
        def forward(self, x):
            return F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x)

    def codes(spec):
        kept = saved_and_gradient(convert(Net(), spec), LAYOUTS["contiguous"])[2]
        return sum(dtype == torch.uint8 for dtype, _ in kept)

    assert [codes(f"fewbit:3,functions={name}") for name in ("gelu", "gelu_tanh", "silu", "gelu/silu")] == [2, 1, 1, 3]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(x)))


def test_only_limits_calls():
    torch.manual_seed(0)
    exact = nn.Sequential(Block(), Block())
    setup = schemes.build("fewbit:1,only=1").apply(TrainingSetup(copy.deepcopy(exact)))

    assert [(site.path, site.was, site.becomes) for site in setup.sites] == [("1", "call of F.gelu", "1-bit GELU")]
    assert [path for path, part in setup.module.named_modules() if "forward" in vars(part)] == ["1"]
    both = schemes.build("fewbit:1,only=1+fewbit:8,only=0").apply(TrainingSetup(exact)).module
    kept = saved_and_gradient(both, torch.randn(4, 8))[2]
    assert [shape.numel() for dtype, shape in kept if dtype == torch.uint8] == [64, 8]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("spec", ["fewbit:3", "invact", "regelu2"])
def test_a_copy_has_calls_of_its_own(spec, copied):
    model = convert(nn.Sequential(Block(), Block()), spec)
    model(torch.randn(4, 8)).sum()  # layers are there now
    twin = copied(model)

    assert all(ReboundForward.of(a).module is a for a in twin)
    same(twin, model, torch.randn(4, 8))
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_a_moved_model_keeps_its_tables():
    model = convert(nn.Sequential(Block()))
    before = saved_and_gradient(model, torch.ones(4, 8))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)

    assert torch.equal(saved_and_gradient(model, torch.ones(4, 8))[1], before[1])
    half = model.half()
    assert half(torch.ones(4, 8).half().requires_grad_()).dtype == torch.float16


def test_threads_do_not_see_each_others_modules():
    model, found = convert(nn.Sequential(Block())), []

    class Waits(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: found.append(saved_and_gradient(F.gelu, LAYOUTS["contiguous"])[2]))
            thread.start()
            thread.join()
            return x

    model[0].narrow = Waits()
    model[0].wide = nn.Identity()
    model(torch.ones(4, 8, requires_grad=True))

    assert found == [saved_and_gradient(F.gelu, LAYOUTS["contiguous"])[2]]


class OwnCheckpoint(nn.Module):
    """A module whose own code recomputes a part of it, outside of its forward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.wide, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def part(self, x):
        return F.gelu(self.wide(x))

    def forward(self, x):
        return F.gelu(checkpoint(self.part, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_module_checkpoints_itself_is_exact_in_both_runs(use_reentrant):
    exact = OwnCheckpoint(use_reentrant)
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(convert(Holds(nn.GELU()))(exact.part(x)).sum(), exact.wide.weight)
    try:
        convert(exact)(x).sum().backward()
    except CheckpointError:
        pytest.fail("the second run saved something else")

    assert torch.equal(exact.wide.weight.grad, expected)


def test_second_derivatives_are_refused():
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(convert(Calls(F.gelu))(x).sum(), x, create_graph=True)


def test_converting_twice_is_refused():
    with pytest.raises(ConversionError, match="calls converted already"):
        convert(convert(nn.Sequential(Block())), "invact")


def test_a_compiled_part_is_refused_before_anything_is_converted():
    model = nn.Sequential(Block(), nn.GELU(), Block())
    parts = list(model)
    model[2].compile()
    with pytest.raises(ConversionError, match=r"^2 calls activations as functions, and torch\.compile"):
        convert(model)

    assert list(model) == parts
    assert not any(ReboundForward.of(part) for part in model)


def test_where_no_wanted_function_is_called_the_message_names_those_that_are():
    with pytest.raises(NothingToConvertError, match=r"none of silu .*only 2 Linear, and its code calls F\.gelu"):
        convert(nn.Sequential(Block()), "fewbit:3,functions=silu")
