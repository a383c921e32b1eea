import pytest
import torch
from torch import nn

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.methods.actnn.layers.savedinput import WHOLE, RowByRow, SavedInput, summed
from actbench.packing import SavedTensors, SiteState

FEW = GroupQuantization(32)


def saved(x, chunk, codec=FEW):
    return SavedInput(SavedTensors(codec).pack(x, SiteState("", 8)), chunk)


@pytest.mark.parametrize(("rows", "chunk", "sizes"), [(10, 3, [3, 3, 4]), (2, 5, [1, 1]), (1, 4, [1]), (7, 1, [7])])
def test_pieces_cover_the_batch(rows, chunk, sizes):
    x = torch.randn(rows, 64)
    cut = saved(x, chunk)
    pieces = cut.pieces()

    assert [len(cut.rows(piece)) for piece in pieces] == sizes
    assert torch.equal(torch.cat([cut.rows(piece) for piece in pieces]), held_whole(cut))


def held_whole(cut):
    return cut.packed.unpack()


def test_rows_that_do_not_lie_outermost_are_not_cut():
    x = torch.randn(64, 10).t()

    assert list(saved(x, 4).pieces()) == [WHOLE]


def test_sums_of_halves_are_gathered_in_float32():
    pieces = [slice(i, i + 1) for i in range(600)]
    one = torch.ones((), dtype=torch.bfloat16)
    total, nothing = summed(pieces, lambda piece: (one, None))

    assert nothing is None
    assert total.dtype == torch.bfloat16
    assert total == torch.tensor(600.0).to(torch.bfloat16)  # bfloat16 would stop at 256
    assert one == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rows_are_written_over_one_tensor_laid_out_as_the_first(layout):
    x = torch.randn(5, 4, 3, 2).contiguous(memory_format=layout)
    rows = RowByRow(5)
    for piece in (slice(0, 2), slice(2, 5)):
        rows.write(piece, x[piece])

    assert torch.equal(rows.whole, x)
    assert rows.whole.stride() == x.stride()


@pytest.mark.parametrize(("threshold", "pieces"), [(None, 1), (10**6, 1), (16 * 64 * 4 + 16 * 8 * 4, 2), (1000, 5)])
def test_a_backward_pass_is_cut_by_the_bytes_of_gradient_and_input(threshold, pieces, monkeypatch):
    """(4608 + 1000) // 1000 pieces of 1000 bytes."""
    layer = compressed(
        nn.Linear(64, 8), SavedTensors(GroupQuantization(32)), SiteState("", 8, pipeline_threshold=threshold)
    )
    rows, sizes = SavedInput.rows, []

    def watched(self, piece):
        sizes.append(rows(self, piece).numel())
        return rows(self, piece)

    monkeypatch.setattr(SavedInput, "rows", watched)
    layer(torch.randn(16, 64)).sum().backward()

    assert len(sizes) == pieces
    assert sum(sizes) == 16 * 64
