import copy
import pickle

import pytest
import torch

from actbench.measuring.meters.trace import AllocationTrace
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.groups import OneGroup
from actbench.methods.actnn.ops import groupquant
from actbench.ops import bitpack
from actbench.packing import SavedTensors, SiteState
from actbench.simulator import temporaries

LAYOUTS = {
    "contiguous": lambda: torch.randn(6, 4, 5, 7),
    "channels last": lambda: torch.randn(6, 4, 5, 7).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(100, 6).t(),
}


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_all_of_a_tensor_shares_one_word_and_comes_back_as_it_lay(lay_out, bits):
    x = lay_out()
    packed = SavedTensors(GroupQuantization(per_group=False)).pack(x, SiteState("", bits))
    back = packed.unpack()

    assert type(packed.codec) is OneGroup
    assert sum(part.nbytes for part in packed.parts) == bitpack.packed_bytes(x.numel(), bits) + 4
    assert (back.shape, back.dtype, back.stride()) == (x.shape, x.dtype, x.stride())
    assert (back - x).abs().max() <= 1.02 * (x.max() - x.min()) / (2**bits - 1)
    assert torch.equal(packed.rows(2, 5), back[2:5])


def test_groups_of_their_own_leave_less_error():
    """What ``per_group=false`` is there to show."""
    x, errors = torch.randn(64, 256) * torch.logspace(-3, 0, 64)[:, None], []
    for per_group in (True, False):
        packed = SavedTensors(GroupQuantization(per_group=per_group)).pack(x, SiteState("", 2))
        errors.append((packed.unpack() - x).square().mean())

    assert errors[1] > 10 * errors[0]


def test_a_watched_place_is_told_ranges_that_compare_with_those_of_groups():
    x = torch.rand(64, 256)
    found = []
    for per_group in (True, False):
        site = SiteState("", 2, watched=True)
        SavedTensors(GroupQuantization(per_group=per_group)).pack(x, site)
        found.append(site.ranges)

    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0)  # every group is nearly as wide as the whole


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda packer: pickle.loads(pickle.dumps(packer))])
def test_a_copy_of_a_packer_has_its_settings(copied):
    codec = GroupQuantization(per_group=False)

    assert copied(SavedTensors(codec)).codec == codec


@pytest.mark.parametrize(
    ("settings", "size", "pieces"),
    [
        ({}, 10**9, 1),
        ({"chunk": 4}, 10**9, 4),
        ({"pipeline_threshold": 1000}, 999, 1),
        ({"pipeline_threshold": 1000}, 1000, 2),  # (bytes + threshold) // threshold, as the authors cut
        ({"pipeline_threshold": 1000}, 3500, 4),
        ({"pipeline_threshold": 1000, "chunk": 3}, 1500, 3),
    ],
)
def test_how_far_a_backward_pass_is_cut(settings, size, pieces):
    assert SiteState("", 2, **settings).pieces(size) == pieces


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [100_000, 2**18 + 8, 3 * 2**18 + 100])
def test_what_one_group_takes_while_it_is_coded_is_simulated(count, dtype, stochastic):
    x, seed = torch.rand(count).to(dtype), torch.tensor(5)
    coded = groupquant.encode_in_one(x, 3, seed, stochastic)
    decoded = groupquant.decode_in_one(*coded, 3, 0, count, dtype)

    def scratch(run, *results):
        with AllocationTrace() as trace:
            trace.mark("begin")
            run()
            trace.mark("end")
        return trace.peak_bytes("begin", "end") - sum(each.nbytes for each in results)

    ops = torch.ops.actbench
    given = (x, 3, seed, stochastic)
    encoding = scratch(lambda: groupquant.encode_in_one(*given), *coded)
    decoding = scratch(lambda: groupquant.decode_in_one(*coded, 3, 0, count, dtype), decoded)

    assert temporaries.cpu(ops.onegroup_encode.default, given, coded) == pytest.approx(encoding, rel=0.01)
    assert temporaries.cpu(ops.onegroup_decode.default, (), decoded) == pytest.approx(decoding, rel=0.01)
