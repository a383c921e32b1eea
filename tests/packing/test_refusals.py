import pytest
import torch
from torch import nn

from actbench.errors import ConversionError
from actbench.packing.refusals import refuse_compiling


class Refusing(nn.Module):
    def forward(self, x):
        refuse_compiling("this", "it stands on storages")
        return x + 1


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_nothing_is_refused_without_a_compiler():
    x = torch.ones(2)
    inner = torch.compile(nn.Tanh(), backend="eager")

    assert torch.equal(nn.Sequential(inner, Refusing())(x), x.tanh() + 1)  # beside a compiled part
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(torch.compile(Refusing(), backend="eager")(x), x + 1)


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: lambda x: module(x) * 2, nn.Sequential])
def test_a_compiled_caller_is_refused_and_not_run_uncompiled(wrap):
    compiled = torch.compile(wrap(Refusing()), backend="eager")
    with pytest.raises(
        ConversionError, match=r"this cannot be compiled: it stands on storages; leave torch\.compile out"
    ):
        compiled(torch.ones(2))


def test_a_module_that_is_compiled_in_place_is_refused():
    module = Refusing()
    module.compile(backend="eager")
    with pytest.raises(ConversionError, match="this cannot be compiled"):
        module(torch.ones(2))
