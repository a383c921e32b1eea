from __future__ import annotations

import contextvars
import copy
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.errors import UsageError
from actbench.packing import samplegradients
from actbench.packing.samplegradients import SampleGradients, samples

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said():
    """Let each test begin as a program does: no samples named, no warning given."""
    samplegradients._warn_once.cache_clear()
    token = samplegradients._current.set(None)
    yield
    samplegradients._current.reset(token)


def step(table, ids, squares):
    """Run one step on these samples, and return what was expected of them."""
    with samples(ids):
        table.begin(torch.empty(len(ids), 3))
    expected = table.expected(CPU)
    table.note(torch.tensor(squares))
    return expected


def test_norms_are_averaged_half_and_half():
    table = SampleGradients()
    assert step(table, [0, 2], [8.0, 4.0]) is None
    assert step(table, [2, 0], [0.0, 16.0]).tolist() == [4.0, 8.0]

    assert step(table, [0, 2], [1.0, 1.0]).tolist() == [12.0, 2.0]
    assert step(table, [0, 2], [0.0, 0.0]).tolist() == [6.5, 1.5]


def test_a_sample_that_was_never_seen_counts_as_the_mean_of_the_others():
    table = SampleGradients()
    step(table, [5, 1], [2.0, 6.0])

    assert step(table, [1, 7, 5, 100_000], [6.0, 1.0, 2.0, 1.0]).tolist() == [6.0, 4.0, 2.0, 4.0]
    assert step(table, [3, 4], [1.0, 1.0]).tolist() == [1.0, 1.0]


def test_a_norm_that_is_no_number_changes_nothing():
    table = SampleGradients()
    step(table, [0, 1], [2.0, torch.inf])
    step(table, [0, 1], [torch.nan, torch.inf])
    step(table, [0, 1], [2.0, 4.0])

    assert step(table, [0, 1], [1.0, 1.0]).tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)]
)
def test_ids_are_given_as_a_data_loader_gives_them(kind):
    table = SampleGradients()
    step(table, kind([3, 1]), [2.0, 4.0])

    assert step(table, kind([1, 3]), [0.0, 0.0]).tolist() == [4.0, 2.0]


def test_ids_hold_until_the_next_call_or_the_end_of_the_block():
    table, x = SampleGradients(), torch.empty(2, 3)
    samples([0, 1])
    table.begin(x)
    table.note(torch.tensor([1.0, 2.0]))
    with samples([1, 0]):
        table.begin(x)
        assert table.expected(CPU).tolist() == [2.0, 1.0]
    table.begin(x)

    assert table.expected(CPU).tolist() == [1.0, 2.0]


def test_the_backward_pass_belongs_to_the_samples_of_its_forward_pass():
    """By then the next batch may have been named, and autograd's threads know of no name at all."""
    table = SampleGradients()
    with samples([0, 1]):
        table.begin(torch.empty(2, 3))
    with samples([8, 9]):
        thread = threading.Thread(target=contextvars.Context().run, args=(table.note, torch.tensor([3.0, 5.0])))
        thread.start()
        thread.join()

    assert step(table, [1, 0], [0.0, 0.0]).tolist() == [5.0, 3.0]


def test_a_forward_pass_that_backward_runs_again_is_of_the_same_samples():
    table, x = SampleGradients(), torch.ones(2, 1, requires_grad=True)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            with samples([6, 7]):
                table.begin(x)
            table.note(grad[:, 0])
            return grad

    with samples([0, 1]):
        table.begin(x)
    Again.apply(x).sum().backward()

    assert step(table, [0, 1], [0.0, 0.0]).tolist() == [1.0, 1.0]
    assert len(table._table) == 2


@pytest.mark.parametrize(("ids", "said"), [(None, "the batches are not named"), ([1, 2, 3], r"given 3 ids for 2 rows")])
def test_without_ids_for_each_row_all_rows_count_the_same_and_that_is_said_once(ids, said):
    table, x = SampleGradients(), torch.empty(2, 3)
    if ids is not None:
        samples(ids)
    with pytest.warns(UserWarning, match=said):
        table.begin(x)
    table.note(torch.tensor([1.0, 2.0]))
    assert table.expected(CPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.begin(x)
        SampleGradients().begin(x)


@pytest.mark.parametrize("ids", [[-1, 0], [0.5, 1.5], [[0, 1]], ["a"], 3])
def test_what_are_no_ids_is_refused(ids):
    with pytest.raises(UsageError, match=r"samples\(\) needs the index in the data set of each row"):
        samples(ids)


def test_ids_on_a_device_are_refused():
    with pytest.raises(UsageError, match=r"ids on meta.*host memory"):
        samples(torch.empty(3, dtype=torch.int64, device="meta"))


def test_fake_steps_leave_no_trace():
    table = SampleGradients()
    step(table, [0, 1], [2.0, 4.0])
    with warnings.catch_warnings(), FakeTensorMode(), samples([0, 1]):
        warnings.simplefilter("error")
        table.begin(torch.empty(2, 3))
        assert table.expected(CPU) is None
        table.note(torch.ones(2))

    assert step(table, [0, 1], [0.0, 0.0]).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copy_has_a_table_of_its_own(copied):
    table = SampleGradients()
    step(table, [0, 1], [2.0, 4.0])
    twin = copied(table)
    step(table, [0, 1], [0.0, 0.0])

    assert step(twin, [0, 1], [0.0, 0.0]).tolist() == [2.0, 4.0]
