import torch

from actbench.ops import hostmemory


def test_a_marked_storage_is_known_by_every_view_of_it():
    tensor = torch.ones(4, 4)
    hostmemory.NOTED.add(tensor.untyped_storage())

    assert tensor.t()[1:].untyped_storage() in hostmemory.NOTED
    assert tensor.clone().untyped_storage() not in hostmemory.NOTED


def test_a_mark_dies_with_its_storage_even_where_the_address_comes_back():
    held = []  # what would be given the address before the next try
    for _ in range(1000):
        tensor = torch.ones(1000)
        address = tensor.data_ptr()
        hostmemory.NOTED.add(tensor.untyped_storage())
        del tensor
        held.append(torch.ones(1000))
        if held[-1].data_ptr() == address:
            break

    assert held[-1].data_ptr() == address
    assert not any(other.untyped_storage() in hostmemory.NOTED for other in held)
