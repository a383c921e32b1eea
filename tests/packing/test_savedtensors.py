from __future__ import annotations

import gc

import torch

from actbench.packing import savedtensors


def test_what_is_said_is_noted_while_somebody_listens():
    x, codes, meta = torch.zeros(3, 4), torch.zeros(6, dtype=torch.uint8), torch.zeros(1)

    with savedtensors.listening():
        savedtensors.packed(x, codes, meta)
        savedtensors.left(x, "too small")

    source = savedtensors.source_of(codes.untyped_storage())
    assert source is savedtensors.source_of(meta.untyped_storage())
    assert source is not None
    assert (source.shape, source.dtype) == ((3, 4), torch.float32)
    assert savedtensors.reason_for(x.untyped_storage()) == "too small"


def test_nothing_is_noted_while_nobody_does():
    x, codes = torch.zeros(3), torch.zeros(3)
    with savedtensors.listening(), savedtensors.listening():
        pass

    savedtensors.packed(x, codes)
    savedtensors.left(x, "too small")

    assert savedtensors.source_of(codes.untyped_storage()) is None
    assert savedtensors.reason_for(x.untyped_storage()) is None


def test_a_note_keeps_no_tensor_alive():
    x, codes = torch.zeros(3), torch.zeros(3)
    with savedtensors.listening():
        savedtensors.packed(x, codes)
        savedtensors.left(x, "too small")
    before = len(savedtensors._sources), len(savedtensors._reasons)

    del x, codes
    gc.collect()

    assert (len(savedtensors._sources), len(savedtensors._reasons)) == (before[0] - 1, before[1] - 1)


def test_a_tensor_without_a_storage_has_no_reason():
    with savedtensors.listening():
        savedtensors.left(torch.zeros(3, 3).to_sparse(), "layout")
