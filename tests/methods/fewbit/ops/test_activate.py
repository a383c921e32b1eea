import pytest
import torch

from actbench.methods.fewbit.ops import activate as module
from actbench.methods.fewbit.ops.activate import FUNCTIONS, reference
from actbench.ops.library import DTYPES

activate = torch.ops.actbench.stepwise_activate
EXACT = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
BOUNDS = torch.tensor([-1.0, 0.0, 2.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_output_is_torchs_and_the_codes_are_those_of_the_encoder(function, dtype):
    for size in (0, 1, 9, 5000):
        x = 3 * torch.randn(size).to(dtype)
        for fold in (False, True):
            y, packed = activate(x, function, BOUNDS, 2, fold)

            assert torch.equal(y, EXACT[function](x))
            assert torch.equal(packed, torch.ops.actbench.stepwise_encode(x, BOUNDS, 2, fold))
            assert all(map(torch.equal, (y, packed), reference(x, function, BOUNDS, 2, fold)))


def test_every_function_has_an_exact_one_here():
    assert set(module.FUNCTIONS) == set(EXACT)
