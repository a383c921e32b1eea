import pytest
import torch

from actbench.packing import Layout, SiteState
from actbench.testing import check_scheme
from theirs.codec import Integers


@pytest.mark.parametrize("spec", ["theirs:8", "theirs:4", "theirs:1", "theirs:4+checkpoint"])
def test_the_contract_of_schemes(spec):
    check_scheme(spec)


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("shape", [(1,), (128,), (7, 43)])
def test_a_decoded_element_is_at_most_a_step_away(bits, shape):
    x = torch.randn(shape)
    codec, layout = Integers(bits), Layout.of(x)
    parts = codec.pack(x.flatten(), layout, SiteState("", bits))
    step = float(x.max() - x.min()) / (2**bits - 1)

    assert (codec.unpack(parts, layout) - x).abs().max() <= step * 1.00001
    assert sum(part.nbytes for part in parts) == codec.packed_bytes(layout)
