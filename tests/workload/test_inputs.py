from __future__ import annotations

import torch

from actbench.simulator.fake import fake_mode
from actbench.workload import base


def test_tokens_cover_the_vocabulary_but_for_the_excluded_ids() -> None:
    ids = base.tokens(64, 64, 10, [0, 4, 9, 4, 400], base.generator(0))

    assert set(ids.flatten().tolist()) == {1, 2, 3, 5, 6, 7, 8}
    assert ids.dtype == torch.int64


def test_masked_labels_keep_a_share_of_the_ids_and_never_none() -> None:
    ids = torch.arange(200 * 100).reshape(200, 100)

    labels = base.masked_labels(ids, base.generator(0))

    kept = labels != base.IGNORED_LABEL
    assert torch.equal(labels[kept], ids[kept])
    assert kept[:, 0].all()
    assert 0.14 < kept[:, 1:].float().mean() < 0.16


def test_the_seed_decides_and_the_global_generator_stays_untouched() -> None:
    before = torch.get_rng_state()

    first = base.images(2, 3, (4, 5), torch.bfloat16, base.generator(7))
    again = base.images(2, 3, (4, 5), torch.bfloat16, base.generator(7))

    assert torch.equal(first, again)
    assert not torch.equal(first, base.images(2, 3, (4, 5), torch.bfloat16, base.generator(8)))
    assert first.shape == (2, 3, 4, 5)
    assert first.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_are_fake_under_a_fake_tensor_mode_at_any_size() -> None:
    with fake_mode():
        ids = base.tokens(2**20, 2**12, 50_000, [1], base.generator(0))
        labels = base.masked_labels(ids, base.generator(0))

    assert type(ids).__name__ == type(labels).__name__ == "FakeTensor"
    assert labels.shape == (2**20, 2**12)
