import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.packing.savedtensors import SharingTable, WeakTensors


class Box:
    pass


def test_what_was_packed_is_found_by_another_tensor_object_of_the_same_place():
    table, source, box = SharingTable(), torch.ones(4, 4), Box()
    table.remember(source, weakref.ref(box))

    assert table.recall(source) is box
    assert table.recall(source.detach()) is box
    assert table.recall(source.view(4, 4)) is box


def test_another_place_type_content_or_purpose_is_not_found():
    table, source, box = SharingTable(), torch.ones(4, 4), Box()
    table.remember(source, weakref.ref(box), "a")

    assert table.recall(source, "b") is None
    assert table.recall(source[1:], "a") is None
    assert table.recall(source.view(16), "a") is None
    assert table.recall(source.t(), "a") is None
    assert table.recall(source.view(torch.int32), "a") is None
    assert table.recall(source.clone(), "a") is None
    source.add_(1)
    assert table.recall(source, "a") is None


def test_a_packed_value_is_not_kept_alive():
    table, source, box = SharingTable(), torch.ones(4), Box()
    table.remember(source, weakref.ref(box))
    del box

    assert table.recall(source) is None


def test_a_source_is_not_kept_alive_and_takes_its_entries_with_it():
    table, source, box = SharingTable(), torch.ones(4), Box()
    storage = weakref.ref(source.untyped_storage())
    table.remember(source, weakref.ref(box))
    del source

    assert storage() is None
    assert len(table) == 0


def test_an_address_that_is_given_again_is_not_taken_for_the_tensor():
    """The packed value lives on, so only the death of the source tells the two tensors apart."""
    memory = np.zeros(1000, np.float32)
    table, source, box = SharingTable(), torch.from_numpy(memory), Box()
    address = source.data_ptr()
    table.remember(source, weakref.ref(box))
    del source
    later = torch.from_numpy(memory)

    assert later.data_ptr() == address
    assert table.recall(later) is None


def test_a_copy_of_a_table_is_empty():
    table, source, box = SharingTable(), torch.ones(4), Box()
    table.remember(source, weakref.ref(box))
    both = copy.deepcopy([table, table])

    assert len(both[0]) == 0
    assert both[0] is both[1]
    assert len(table) == 1


def test_inference_tensors_are_not_shared():
    table = SharingTable()
    with torch.inference_mode():
        source, box = torch.ones(4), Box()
        table.remember(source, weakref.ref(box))

    assert table.recall(source) is None


@pytest.mark.parametrize("fake", [False, True])
def test_weak_tensors_come_back_while_their_storages_live(fake):
    with FakeTensorMode() if fake else torch.no_grad():
        first, second = torch.arange(12.0).view(3, 4)[1:].t(), torch.ones((), dtype=torch.int64)
        weak = WeakTensors(first, second)
        alias = first.detach()  # another tensor over the storage, as checkpointing keeps it
        del first
        back, _ = weak()

        assert back.untyped_storage() is alias.untyped_storage()
        assert (back.shape, back.stride(), back.storage_offset()) == ((4, 2), (1, 4), 4)
        assert fake or torch.equal(back, alias)
        del back
        storage = weakref.ref(alias.untyped_storage())
        del alias
        gc.collect()

        assert storage() is None
        assert weak() is None


def test_entries_that_can_never_be_found_again_are_dropped():
    """An input buffer is filled in place at every step; its storage lives on."""
    table, source, boxes = SharingTable(), torch.ones(4, 4), [Box() for _ in range(5)]
    for box in boxes:
        source.add_(1)
        table.remember(source, weakref.ref(box), "a")
        table.remember(source[1:], weakref.ref(box), "b")

    assert len(table) == 2
    assert table.recall(source, "a") is table.recall(source[1:], "b") is box
    del box, boxes
    table.remember(source, weakref.ref(table))

    assert len(table) == 1
