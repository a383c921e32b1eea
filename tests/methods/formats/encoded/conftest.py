import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded_and_nothing_left():
    """The noise of each test is its own, and no hook is left after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
