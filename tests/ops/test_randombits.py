import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.ops import noise
from actbench.ops.noise import random_words

CPU = torch.device("cpu")


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (3, 7), (2**40, 5)])
def test_words_are_those_of_the_noise(first, count):
    for seed in (0, -5, 2**63 - 1):
        assert torch.equal(random_words(torch.tensor(seed), first, count, CPU), noise.words(seed, first, count, CPU))


@pytest.mark.parametrize("fake", [False, True])
def test_wrong_arguments_are_refused_on_real_and_fake_tensors(fake):
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad():
        for seed, first, count, message in [
            (torch.tensor([0]), 0, 1, "0-d int64"),
            (torch.tensor(0.0), 0, 1, "0-d int64"),
            (torch.tensor(0), -1, 1, "not negative"),
            (torch.tensor(0), 0, -1, "not negative"),
        ]:
            with pytest.raises(ValueError, match=message):
                random_words(seed, first, count, CPU)
