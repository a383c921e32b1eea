"""What the code of a module calls is read off it."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, functional as F
from torch.nn.functional import silu as swish

from actbench.methods.fewbit.called.code import functions_called
from actbench.methods.fewbit.called.functions import ALIASES, FUNCTIONS, METHODS
from actbench.packing.forwardwrapper import ReboundForward

TABLE = {"gelu": F.gelu, "other": len}
ORDERED = OrderedDict(TABLE)
LONG = {**dict.fromkeys(range(256), len), "gelu": F.gelu}


class Lazy(OrderedDict):
    """Imports what is asked for, as the tables of models that libraries have."""

    def values(self):
        raise AssertionError("every entry is imported")

    __iter__ = __len__ = items = values


LAZY = Lazy()


def helper(x):
    return 2 * F.mish(x)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def own_loss(x):
    return torch.sigmoid(x)


LOSSES = {"own": own_loss}


class Module(nn.Module):
    relu: nn.Module

    def __init__(self, activation=None):
        super().__init__()
        self.relu, self.activation = nn.ReLU(), activation

    def method(self, x):
        return x.tanh()

    @property
    def loss(self):
        return LOSSES["own"]


def module(forward, **attributes):
    made = type("Made", (Module,), {"forward": forward})()
    vars(made).update(attributes)
    return made


class Parent(Module):
    def forward(self, x):
        return F.elu(x)


class Child(Parent):
    def forward(self, x):
        return super().forward(x)


def nested(self, x):
    def inner(y):
        return F.selu(self.method(y))

    return [inner(y) for y in x]


CASES = {
    "F": (module(lambda self, x: F.gelu(x)), [F.gelu]),
    "torch.nn.functional": (module(lambda self, x: torch.nn.functional.gelu(x)), [F.gelu]),
    "another name of the module": (module(lambda self, x: functional.relu(x)), [F.relu]),
    "a name that was imported": (module(lambda self, x: swish(x)), [F.silu]),
    "torch": (module(lambda self, x: torch.relu(x)), [torch.relu]),
    "a method of a tensor": (module(lambda self, x: x.relu()), [Tensor.relu]),
    "a method of what is not known": (module(lambda self, x: (x + 1).sigmoid()), [Tensor.sigmoid]),
    "what calls a method": (module(lambda self, x: F.tanh(x)), [Tensor.tanh]),
    "a layer of the same name": (module(lambda self, x: self.relu(x)), []),
    "an attribute": (module(lambda self, x: self.act(x), act=F.hardswish), [F.hardswish]),
    "a partial one": (module(lambda self, x: self.act(x), act=functools.partial(F.gelu)), [F.gelu]),
    "a lambda": (module(lambda self, x: self.act(x), act=lambda x: F.celu(x)), [F.celu]),
    "a table": (module(lambda self, x: TABLE["gelu"](x)), [F.gelu]),
    "an ordered table": (module(lambda self, x: ORDERED["gelu"](x)), [F.gelu]),
    "a table that is too long": (module(lambda self, x: LONG["gelu"](x)), []),
    "a lazy table": (module(lambda self, x: F.elu(LAZY["gelu"](x))), [F.elu]),
    "a function of its own": (module(lambda self, x: helper(x)), [F.mish]),
    "a method of its own": (module(lambda self, x: self.method(x)), [Tensor.tanh]),
    "a function inside": (module(nested), [F.selu, Tensor.tanh]),
    "a decorated forward": (module(decorated(lambda self, x: F.gelu(x))), [F.gelu]),
    "the forward of its parent": (Child(), [F.elu]),
    "one of a table of losses": (module(lambda self, x: self.loss(x)), []),
    "a name alone": (module(lambda self, x: x + len("gelu")), []),
    "a layer of torch": (nn.TransformerEncoderLayer(4, 2, activation=F.gelu), [F.gelu]),
    "a container": (nn.Sequential(nn.GELU()), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_called_is_found(name):
    made, expected = CASES[name]

    assert set(functions_called(made)) == set(expected)


def test_a_forward_of_ours_in_front_hides_nothing():
    made, expected = CASES["F"]
    ReboundForward(made).bind()
    try:
        assert list(functions_called(made)) == expected
    finally:
        ReboundForward.of(made).unbind()


def test_a_forward_of_somebody_else_is_read():
    made = module(lambda self, x: F.gelu(x))
    made.forward = lambda x: torch.relu(x)

    assert functions_called(made) == (torch.relu,)


def test_functions_that_call_each_other_are_read_once():
    def first(x, again=True):
        return second(x) if again else F.gelu(x)

    def second(x):
        return first(x, again=False)

    assert functions_called(module(lambda self, x: first(x))) == (F.gelu,)


def test_every_name_of_a_function_is_known():
    """Every name under ``F``, ``torch`` and tensors of what layers compute is listed, but what has no layer."""
    words = {called.name.rpartition(".")[2].rstrip("_") for called in FUNCTIONS.values()} | {"log_sigmoid"}
    for place in (F, torch, Tensor):
        for name, function in vars(place).items():
            if name.rstrip("_") in words and name not in ("sigmoid_", "tanh_"):
                assert function in FUNCTIONS or function in ALIASES, f"{place.__name__}.{name}"
    assert set(METHODS) == {"relu", "relu_", "sigmoid", "tanh", "hardshrink"}
