"""Compilers change how a model's tensors lie; the operators are still run on those that they were traced with."""

import pytest
import torch
from torch import nn
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaqstep.rules import SgdRule
from actbench.ops.library import library

OPS = torch.ops.actbench
SHAPE = (2, 3, 4, 5)
FORMAT = (6, 7, 64, 256)
STEP = (3, 0, [0.0] * len(SgdRule._fields), *FORMAT)
SEED = torch.tensor(3)
CALLS = {
    "relu_mask": lambda x: OPS.relu_mask(x),
    "relu_mask_": lambda x: OPS.relu_mask_(x),
    "mask_select": lambda x: OPS.mask_select(x.new_empty(15, dtype=torch.uint8), x),
    "stepwise_encode": lambda x: OPS.stepwise_encode(x, x.new_empty(3), 2, False),
    "stepwise_decode": lambda x: OPS.stepwise_decode(x.new_empty(30, dtype=torch.uint8), x.new_empty(4), x, 2),
    "stepwise_activate": lambda x: OPS.stepwise_activate(x, "silu", x.new_empty(3), 2, False),
    "smaq_encode": lambda x: OPS.smaq_encode(x, SEED, True, *FORMAT),
    "smaqstep_sgd_": lambda x: OPS.smaqstep_sgd_(x, x, OPS.smaq_encode(x.reshape(-1), SEED, True, *FORMAT), *STEP),
    "onegroup_encode": lambda x: OPS.onegroup_encode(x[0, 0, 0], 2, SEED, True),
    "groupquant_encode": lambda x: OPS.groupquant_encode(x[0, 0, 0], 2, 32, SEED, True),
    "groupquant_words": lambda x: OPS.groupquant_words(x[:, 0, :, 0], 32),
    "groupquant_encode_rows": lambda x: OPS.groupquant_encode_rows(
        x[:, 0, :, 0], x.new_empty(2, dtype=torch.int32), 4, 32, SEED, True
    ),
}


def test_every_operator_asks_for_the_strides_of_its_trace():
    names = {name.removeprefix("actbench::") for name in library._op_defs}
    assert set(CALLS) <= names
    for name in names:
        assert get_layout_constraint_tag(getattr(OPS, name).default) is torch.Tag.needs_exact_strides, name


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_fakes_answer_for_any_strides_as_for_a_contiguous_tensor(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        contiguous, channels_last = torch.empty(SHAPE), torch.empty(SHAPE, memory_format=torch.channels_last)
        found = [tuple(lying(out) for out in outputs(call(x))) for x in (contiguous, channels_last)]
    assert found[0] == found[1]


def outputs(found):
    return found if isinstance(found, tuple) else () if found is None else (found,)


def lying(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_real_tensors_of_other_strides_are_refused(call):
    x = torch.randn(SHAPE).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="must be contiguous"):
        call(x)


@pytest.mark.slow
def test_a_compiled_function_may_encode_what_a_convolution_gives():
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3)

    def halves(x):
        y = convolution(convolution.weight.new_ones(()) * x)
        return y, smaq.decode(smaq.encode(y, SEED), y.numel(), y.dtype)

    x = torch.randn(2, 3, 9, 14)
    (y, expected), (compiled, found) = halves(x), torch.compile(halves, fullgraph=True)(x)
    assert torch.allclose(compiled, y, atol=1e-6)
    assert (found - expected).norm() < 1e-3 * expected.norm()
