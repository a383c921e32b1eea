import pytest
import torch

from actbench.ops import noise
from actbench.ops.noise import random_words

CPU = torch.device("cpu")


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (3, 7), (2**40, 5)])
def test_words_are_those_of_the_noise(first, count):
    for seed in (0, -5, 2**63 - 1):
        assert torch.equal(random_words(torch.tensor(seed), first, count), noise.words(seed, first, count, CPU))
