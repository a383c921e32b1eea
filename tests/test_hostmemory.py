import torch

from actbench import hostmemory


def test_a_marked_storage_is_known_by_every_view_of_it():
    tensor = torch.ones(4, 4)
    hostmemory.mark(tensor.untyped_storage())

    assert hostmemory.is_host(tensor.t()[1:].untyped_storage())
    assert not hostmemory.is_host(tensor.clone().untyped_storage())


def test_a_mark_dies_with_its_storage_even_where_the_address_comes_back():
    tensor = torch.ones(1000)
    address = tensor.data_ptr()
    hostmemory.mark(tensor.untyped_storage())
    del tensor

    later = []
    while not any(other.data_ptr() == address for other in later) and len(later) < 1000:
        later.append(torch.ones(1000))

    assert any(other.data_ptr() == address for other in later)
    assert not any(hostmemory.is_host(other.untyped_storage()) for other in later)
