"""Which calls of a model are reached, and that others are not."""

import copy
import threading

import pytest
import torch
from activationcalls import LAYOUTS, Block, Holds, convert, same, saved_and_gradient
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError
from actbench.packing.forwardwrapper import ReboundForward
from actbench.scheme.setup import TrainingSetup


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


def test_only_limits_calls():
    torch.manual_seed(0)
    exact = nn.Sequential(Block(), Block())
    setup = schemes.build("fewbit:1,only=1").apply(TrainingSetup(copy.deepcopy(exact)))

    assert [(site.path, site.was, site.becomes) for site in setup.sites] == [("1", "call of F.gelu", "1-bit GELU")]
    assert [path for path, part in setup.module.named_modules() if "forward" in vars(part)] == ["1"]
    both = schemes.build("fewbit:1,only=1+fewbit:8,only=0").apply(TrainingSetup(exact)).module
    kept = saved_and_gradient(both, torch.randn(4, 8))[2]
    assert [shape.numel() for dtype, shape in kept if dtype == torch.uint8] == [64, 8]


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
