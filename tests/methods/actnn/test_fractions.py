"""Tensors that take a fraction of a bit more than a whole width."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn.groupquantization import GroupQuantization, groups_of
from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.ops import groupquant
from actbench.packing import SavedTensors, SiteState
from actbench.packing.layout import Layout
from actbench.simulator.tracker import StorageTracker

GROUP = 64


@pytest.mark.parametrize("count", [64, 71, 72, 128, 1000, 4096])
@pytest.mark.parametrize("bits", [1, 1.4, 2.5, 3.9, 7.99, 8])
def test_codes_have_the_stated_bits_but_for_half_a_group(count, bits):
    x = torch.randn(count)
    groups, layout = Groups(bits, GROUP), Layout.of(x)
    codes, words = groups.encode(x, layout)
    back = groups.unpack((codes, words), layout)
    ranges = groupquant.ranges(words).repeat_interleave(GROUP)[:count]

    rest = count % GROUP  # elements of the last group are never the wider ones, nor the group before fewer than 8
    assert abs(codes.numel() * 8 - count * bits) <= (GROUP if 0 < rest < 8 else GROUP / 2 + rest) + 8
    assert words.numel() == -(-count // GROUP)
    assert codes.numel() * 8 - count * groups.bits(layout) in range(8)
    assert ((back - x).abs() <= ranges / (2 ** int(bits) - 1) + 0.02).all()
    wider = groups.division(layout)[1]
    assert ((back - x).abs()[:wider] <= ranges[:wider] / (2 ** (int(bits) + 1) - 1) + 0.02).all()


def test_a_part_is_decoded_as_in_the_whole():
    x = torch.randn(10 * GROUP + 40)
    groups, layout = Groups(2.5, GROUP), Layout.of(x)
    parts = groups.encode(x, layout)
    back = groups.unpack(parts, layout)

    for start, wanted in ((0, 5 * GROUP), (3, 40), (4 * GROUP + 8, 2 * GROUP), (5 * GROUP, 5 * GROUP), (6 * GROUP, 9)):
        part = groups.decode(parts, layout, start, wanted)
        assert torch.equal(part, back[start : start + wanted])


@pytest.mark.parametrize("row", [0, 100])
def test_the_mean_of_many_draws_is_the_tensor_and_bits_changed_meanwhile_are_read_off_the_codes(row):
    x = torch.randn(12, 100)
    first, second, layout = groups_of(x, 2, row, GROUP), groups_of(x, 2.5, row, GROUP), Layout.of(x)
    later = [second.encode(x.view(-1), layout) for _ in range(400)]
    mean = sum(first.unpack(parts, layout) for parts in later) / len(later)
    bits = second.bits(layout)

    assert (mean - x).abs().mean() < 0.03
    assert 2.4 < bits < 2.6
    assert torch.equal(first.rows(later[0], layout, 3, 8), second.unpack(later[0], layout)[3:8])


def test_no_codes_are_there_but_those_that_are_kept():
    x = torch.randn(100 * GROUP)
    with StorageTracker() as ledger:
        codes, words = Groups(2.5, GROUP).encode(x, Layout.of(x))

    assert ledger.peak_bytes == x.nbytes + codes.nbytes + words.nbytes


@pytest.mark.parametrize("row", [0, 100])
def test_fake_tensors_are_kept_in_as_many_bytes(row):
    def parts(x):
        return [
            part.nbytes for part in SavedTensors(GroupQuantization(GROUP)).pack(x, SiteState("", 2.7, row=row)).parts
        ]

    with FakeTensorMode():
        simulated = parts(torch.empty(12, 100))
    assert simulated == parts(torch.randn(12, 100))


def test_a_simulation_runs_the_one_operator_of_whole_bits():
    groups, names = Groups(2.5, GROUP), []
    with FakeTensorMode(), StorageTracker(observe=lambda func, *_: names.append(func._schema.name)):
        x = torch.empty(100 * GROUP)
        layout = Layout.of(x)
        parts = groups.encode(x, layout)
        groups.unpack(parts, layout)
        part = groups.decode(parts, layout, 3, 40)

    found = [name.removeprefix("actbench::") for name in names if "groupquant" in name]
    assert found == ["groupquant_encode_", "groupquant_decode", "groupquant_decode"]
    assert sum(each.nbytes for each in parts) == groups.packed_bytes(layout)
    assert part.shape == (40,)
