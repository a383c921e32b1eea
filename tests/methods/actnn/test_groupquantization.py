"""Groups that end with a row: what they cost, and what they leave of small rows beside large ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.methods.actnn.groupquantization import GroupQuantization, RowGroups, RowWidths, groups_of, size_within
from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.layers.layers import compressed, small_codes
from actbench.methods.actnn.ops import groupquant
from actbench.ops import bitpack
from actbench.packing import Packed, SavedTensors, SiteState
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.layout import Layout

ROWS = 64


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("row", "size"),
    [(0, 256), (16, 256), (32, 32), (48, None), (96, 96), (100, None), (192, 192), (256, 256), (320, 160), (384, 192),
     (416, None), (768, 256), (1024, 256)],
)  # fmt: skip
def test_groups_end_with_rows_and_there_are_no_more_of_them_than_needed(row, size):
    x = torch.empty(4, row) if row else torch.empty(4, 8)

    assert size_within(x, row, 256) == size
    if size is not None and row >= 32:
        assert row % size == 0
        assert row // size == -(-row // 256)


def test_rows_that_do_not_lie_together_mean_nothing():
    x = torch.empty(8, 6, 48)

    assert size_within(x, 48, 256) is None
    assert size_within(x.transpose(0, 1), 48, 256) is None  # each row still lies together
    assert size_within(x.transpose(1, 2), 6 * 48, 256) == 256
    assert size_within(x, 3 * 48, 256) is None  # a half of 6 rows, as group norm has
    assert size_within(x[..., ::2], 24 * 6, 256) == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("row", [48, 100, 416])
def test_rows_come_back_within_a_step_of_their_own_range(row, bits, dtype):
    x = (torch.randn(6, 4, row) * 10.0 ** torch.arange(24).view(6, 4, 1)).to(dtype)
    codec, layout = groups_of(x, bits, row, 256), Layout.of(x)
    packed = Packed(codec, layout, codec.encode(x.view(-1), layout))
    back = packed.unpack()
    error, ranges = (back - x).abs().amax(2).double(), (x.amax(2) - x.amin(2)).double()
    rounding = x.abs().amax(2).double() / 128  # of the bounds, and of bfloat16
    words = 24 * -(-row // 256)

    assert isinstance(packed.codec, RowGroups)
    assert (packed.bits, back.shape, back.dtype) == (bits, x.shape, dtype)
    assert [part.nbytes for part in packed.parts] == [24 * -(-row // 8) * bits, 4 * words]
    assert (error <= ranges / (2**bits - 1) + rounding).all()
    assert torch.equal(packed.rows(2, 5), back[2:5])
    halves = packed._replace(layout=Layout.of(x.view(-1, row // 2)))
    assert not halves.divisible
    assert torch.equal(halves.rows(1, 3), back.view(-1, row // 2)[1:3])


def uneven(width, large=1e3):
    """Rows of scale 1 and of a large one in turn."""
    scales = torch.tensor([1.0, large]).repeat(ROWS // 2)
    return torch.randn(4, ROWS, width) * scales[:, None]


def error_of_a_norm(model, exact, x, dy):
    def found(layer):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(layer(leaf * 1.0), [leaf, *layer.parameters()], dy)

    (small, weight, _), (right, right_weight, _) = found(model), found(exact)
    rows = slice(0, None, 2)  # those of scale 1
    of_rows = (small[:, rows] - right[:, rows]).norm() / right[:, rows].norm()
    return float(of_rows), float((weight - right_weight).norm() / right_weight.norm())


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("width", [48, 96, 100, 192, 384])
def test_a_small_row_beside_a_large_one_has_its_gradient(width, per_sample):
    """In groups across rows the errors are 390 to 3,700 times the gradient of a small row."""
    exact = nn.LayerNorm(width)
    model = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), SiteState("", 4, per_sample=per_sample))
    x, dy = uneven(width), torch.randn(4, ROWS, width)

    assert max(error_of_a_norm(model, exact, x, dy)) < 0.25


@pytest.mark.parametrize("width", [48, 96, 100])
def test_hooks_know_the_rows_of_a_norm(width):
    exact = nn.LayerNorm(width)
    model = copy.deepcopy(exact)
    HookedForward(model, Hooks(SavedTensors(GroupQuantization()), 4, small_codes(), whole_model=False)).bind()

    assert max(error_of_a_norm(model, exact, uneven(width), torch.randn(4, ROWS, width))) < 0.25


def test_the_groups_of_group_norm_are_rows():
    exact = nn.GroupNorm(8, 32)
    x = torch.randn(4, 32, 5, 5) * torch.tensor([1.0, 1e3]).repeat(4).repeat_interleave(4)[:, None, None]
    dy = torch.randn(4, 32, 5, 5)
    model = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), site := SiteState("", 4))
    one, two = (
        torch.autograd.grad(layer(leaf), leaf, dy)[0]
        for layer in (model, exact)
        for leaf in [x.clone().requires_grad_()]
    )
    small = (one - two).view(4, 8, -1)[:, ::2]

    assert site.row == 4 * 5 * 5
    assert small.norm() < 0.25 * two.view(4, 8, -1)[:, ::2].norm()


@pytest.mark.parametrize(("width", "words"), [(96, 4 * ROWS), (768, 3 * 4 * ROWS)])
def test_a_norm_costs_a_word_for_each_group_of_a_row(width, words):
    site = SiteState("", 2, row=width)
    packed = SavedTensors(GroupQuantization()).pack(torch.randn(4, ROWS, width), site)

    assert isinstance(packed.codec, Groups)
    assert [part.nbytes for part in packed.parts] == [bitpack.packed_bytes(4 * ROWS * width, 2), 4 * words]


def test_samples_share_bits_out_with_groups_that_end_with_rows():
    x = torch.randn(4, ROWS, 96)
    packed = SavedTensors(GroupQuantization()).pack(x, SiteState("", 2.5, per_sample=True, row=96))

    assert isinstance(packed.codec, RowWidths)
    assert packed.codec.group_size == 96
    assert packed.parts[1].numel() == 4 * ROWS


@pytest.mark.parametrize("row", [0, 96, 100])
def test_ranges_are_those_of_groups_of_the_usual_size(row):
    """Of equal numbers, whatever the groups are: a place's variance is compared with that of others."""
    x = torch.rand(4, ROWS, 100 if row == 100 else 96)
    site = SiteState("", 2, watched=True, row=row)
    SavedTensors(GroupQuantization()).pack(x, site)

    assert float(site.ranges) == pytest.approx(x.numel() / 256, rel=0.3)


def test_a_linear_layer_has_groups_without_regard_to_rows():
    model = nn.Linear(96, 8)
    HookedForward(model, Hooks(SavedTensors(GroupQuantization()), 4, {}, whole_model=False)).bind()
    packed = []
    hooks = HookedForward.of(model).hooks
    pack = hooks.pack
    hooks.pack = lambda tensor: packed.append(held := pack(tensor)) or held
    F.relu(model(torch.randn(8, 96, requires_grad=True) * 1)).sum()

    sizes = [sum(part.nbytes for part in held.packed.parts) for held in packed if hasattr(held, "packed")]
    assert sizes == [groupquant.packed_bytes(8 * 96, 4, 256)]
