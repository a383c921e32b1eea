from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.methods.actnn.groupquantization import GroupQuantization, RowWidths
from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import group_ranges
from actbench.methods.actnn.solver import row_widths
from actbench.packing import SavedTensors, SiteState, samplegradients
from actbench.packing.layout import in_order, memory_order
from actbench.packing.samplegradients import SampleGradients, samples

GROUP = 32
LAYOUTS = {
    "contiguous": lambda: torch.randn(6, 4, 5, 7),
    "channels last": lambda: torch.randn(6, 4, 5, 7).to(memory_format=torch.channels_last),
    "a view with gaps": lambda: torch.randn(6, 8, 5, 7)[:, ::2],
    "a matrix": lambda: torch.randn(6, 100),
}


def spread(x):
    """Let the rows have ranges from 1 to a million."""
    return x * (10.0 ** torch.arange(len(x))).view(-1, *[1] * (x.dim() - 1))


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bits", [1, 1.25, 2, 3.7, 8])
def test_rows_have_the_widths_of_their_ranges_and_come_back_as_they_lay(lay_out, bits):
    x = spread(lay_out())
    packed = SavedTensors(GroupQuantization(GROUP)).pack(x, SiteState("", bits, per_sample=True))
    codes, meta, widths = packed.parts
    columns = x[0].numel()
    costs = group_ranges(in_order(x, memory_order(x)).flatten(1), GROUP).square().sum(1)
    back = packed.unpack()

    assert isinstance(packed.codec, RowWidths)
    assert packed.codec.total_bits == int(widths.sum()) == round(6 * bits)
    assert codes.numel() == -(-columns // 8) * round(6 * bits)
    assert meta.numel() == 6 * -(-columns // GROUP)
    assert torch.equal(widths, row_widths(costs, round(6 * bits)))
    assert widths.diff().min() >= 0
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert back.is_contiguous() or back.stride() == x.stride()
    error = (back - x).abs().flatten(1).amax(1)
    ranges = 1.02 * (x.flatten(1).amax(1) - x.flatten(1).amin(1))
    assert (error <= ranges / (2.0**widths - 1)).all()
    assert torch.equal(packed.rows(2, 5), back[2:5])


def test_rows_that_are_not_one_behind_the_other_have_the_average_together():
    x = torch.randn(100, 6).t()
    site = SiteState("", 2.4, per_sample=True, watched=True)
    packed = SavedTensors(GroupQuantization(GROUP)).pack(x, site)

    assert isinstance(packed.codec, Groups)
    assert packed.parts[0].numel() * 8 / 600 == pytest.approx(2.4, abs=GROUP / 600)
    assert site.ranges.shape == ()


def test_rows_shorter_than_a_group_share_groups():
    packed = SavedTensors(GroupQuantization(GROUP)).pack(torch.randn(200, 31), SiteState("", 2, per_sample=True))

    assert isinstance(packed.codec, Groups)
    assert sum(part.nbytes for part in packed.parts) == groupquant.packed_bytes(200 * 31, 2, GROUP)


def test_a_watched_place_is_told_the_ranges_of_its_rows():
    x, site = spread(torch.randn(6, 64)), SiteState("", 2, per_sample=True, watched=True)
    SavedTensors(GroupQuantization(GROUP)).pack(x, site)

    assert torch.equal(site.ranges, group_ranges(x, GROUP).square().sum(1))


def test_rows_whose_gradients_were_large_are_given_more():
    x, site = (
        torch.randn(1, 64).expand(4, 64).contiguous(),
        SiteState("", 2, per_sample=True, sample_gradients=SampleGradients()),
    )
    packer = SavedTensors(GroupQuantization(GROUP))
    with samples([0, 1, 2, 3]):
        assert packer.pack(x, site).parts[2].tolist() == [2, 2, 2, 2]
        site.see_gradient(torch.tensor([[0.01], [1.0], [0.01], [1.0]]))
    with samples([1, 3, 0, 2]):
        assert packer.pack(x.clone(), site).parts[2].tolist() == [3, 3, 1, 1]


def test_a_shared_tensor_is_of_the_samples_of_each_place():
    x = torch.randn(4, 64)
    packer, one, two = (
        SavedTensors(GroupQuantization(GROUP)),
        *(SiteState("", 2, per_sample=True, sample_gradients=SampleGradients()) for _ in range(2)),
    )
    with samples([0, 1, 2, 3]):
        first, second = packer.pack(x, one), packer.pack(x, two)
        two.see_gradient(torch.ones(4, 1))
        assert two.sample_gradients.expected(x.device).tolist() == [1, 1, 1, 1]

    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(first.parts, second.parts, strict=True))
    assert (two.owner, two.elements) == (one, 0)


def test_a_transposed_view_of_shared_rows_comes_back():
    x, packer = torch.randn(64, 64), SavedTensors(GroupQuantization(GROUP))
    site, other = SiteState("", 8, per_sample=True), SiteState("", 8, per_sample=True)
    packed, seen = packer.pack(x, site), packer.pack(x.t(), other)
    back = packed.unpack()

    assert other.owner is site
    assert torch.equal(seen.unpack(), back.t())
    assert torch.equal(seen.rows(3, 9), back.t()[3:9])


def test_nothing_waits_for_the_device(monkeypatch):
    """The reference of the rows' encoding does; the kernels do not, and neither does what is around them."""
    waits = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}

    class NoWait(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in waits, function
            return function(*args, **(kwargs or {}))

    def encode_rows(x, widths, total_bits, group_size, seed, stochastic):
        return x.new_empty(1, dtype=torch.uint8), x.new_empty(1, dtype=torch.int32)

    monkeypatch.setattr(groupquant, "encode_rows", encode_rows)
    site = SiteState("", 2, per_sample=True, watched=True, sample_gradients=SampleGradients())
    with samples([0, 1, 2, 3]), NoWait():
        for _ in range(2):
            SavedTensors(GroupQuantization(GROUP)).pack(torch.randn(4, 64), site)
            site.see_gradient(torch.randn(4, 10))

    assert site.sample_gradients.expected(torch.device("cpu")).shape == (4,)


def test_fake_rows_have_the_bytes_of_real_ones():
    samplegradients._warn_once.cache_clear()
    with FakeTensorMode():
        site = SiteState("", 2.3, per_sample=True, sample_gradients=SampleGradients())
        fake = SavedTensors(GroupQuantization(GROUP)).pack(torch.randn(6, 4, 5, 7), site)
        back = fake.unpack()
    real = SavedTensors(GroupQuantization(GROUP)).pack(torch.randn(6, 4, 5, 7), SiteState("", 2.3, per_sample=True))

    assert [part.nbytes for part in fake.parts] == [part.nbytes for part in real.parts]
    assert fake.codec == real.codec
    assert back.shape == (6, 4, 5, 7)
