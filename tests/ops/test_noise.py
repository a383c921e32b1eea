import numba
import numpy as np
import pytest
import torch

from actbench.ops import noise
from actbench.ops.cpu import halves

CPU = torch.device("cpu")
WORD = (1 << 64) - 1


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, in integers of any size."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        found.append(z ^ (z >> 31))
    return found


def test_splitmix64_is_the_published_one():
    """First outputs for seed 1234567, as in the reference implementation's documentation."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_words_are_splitmix64_from_the_mixed_seed(seed):
    state = splitmix64(seed & WORD, 1)[0]

    found = noise.words(seed, 0, 50, CPU)

    assert [word & WORD for word in found.tolist()] == splitmix64(state, 50)


def test_any_part_of_the_words_can_be_made_alone():
    assert torch.equal(noise.words(9, 0, 100, CPU)[37:60], noise.words(9, 37, 23, CPU))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_lanes_are_the_words_cut_from_the_low_end(bits):
    words = [word & WORD for word in noise.words(3, 0, 4, CPU).tolist()]
    cut = [(word >> shift) & ((1 << bits) - 1) for word in words for shift in range(0, 64, bits)]

    assert noise.lanes(3, 0, len(cut), bits, CPU).tolist() == cut
    assert noise.lanes(3, 3, len(cut) - 4, bits, CPU).tolist() == cut[3:-1]
    assert noise.lanes(3, 3, 0, bits, CPU).tolist() == []


def test_seeds_that_differ_by_the_step_of_the_counter_do_not_overlap():
    """Without mixing, word 1 of a seed would be word 0 of the seed one step on."""
    related = [noise.signed(5 + step * noise.GOLDEN) for step in range(20)]

    words = torch.cat([noise.words(seed, 0, 200, CPU) for seed in related])

    assert len(words.unique()) == 20 * 200


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
@pytest.mark.parametrize("words", [0, 1, 1000, 2**40])
def test_an_advanced_seed_has_the_words_from_there_on(seed, words):
    found = noise.advanced(seed, words)

    assert -(2**63) <= found < 2**63
    assert torch.equal(noise.words(found, 0, 20, CPU), noise.words(seed, words, 20, CPU))
    assert noise.unmixed(noise.mixed(seed)) == seed & WORD


def sequence(seed: int, number: int) -> list[int]:
    """The 32 numbers of a sequence, one after the other, in integers of any size."""
    state, half = splitmix64(seed & WORD, 1)[0], (1 << 32) - 1
    word = (number * 0x9E3779B1 + state) & half
    word = ((word ^ (word >> 16)) * 0x85EBCA6B + (state >> 32)) & half
    word ^= word >> 13
    increment = word | 1
    word = (word * 0xC2B2AE35) & half
    word ^= word >> 16
    found = []
    for _ in range(32):
        word = (word * 0xADB4A92D + increment) & half
        found.append(word >> 17)
    return found


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_the_sequences_of_a_unit_take_turns_every_eight_elements(seed, width):
    for unit in (0, 5, 2**20):
        units = noise.numbers(seed, unit, 3, width, CPU)
        for row in range(3):
            runs = units[row].view(4, width, 8).transpose(0, 1).reshape(width, 32)
            assert runs.tolist() == [sequence(seed, (unit + row) * width + place) for place in range(width)]


@numba.njit
def filled(state, unit, width, found):
    halves.fill_noise(state, unit, width, found)


@pytest.mark.parametrize("width", [1, 4, 8, 32])
def test_noise_on_the_cpu_is_that_of_the_reference(width):
    for seed, unit in ((3, 0), (-5, 2**27 // width - 1), (2**62, 77)):
        expected = 256 + noise.numbers(seed, unit, 1, width, CPU)[0].double() / 2**15
        for size in (8, 16 * width, 32 * width):
            found = np.empty(size, np.float32)
            filled(noise.state_of(seed), unit, width, found)
            assert found.tolist() == expected[:size].tolist()


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 1234567])
@pytest.mark.parametrize("first", [0, 1, 1000, 2**31 + 8])
def test_a_seed_can_begin_at_any_sequence(seed, first):
    found = noise.from_sequence(seed, first)

    assert -(2**63) <= found < 2**63
    assert torch.equal(noise.numbers(found, 0, 20, 1, CPU), noise.numbers(seed, first, 20, 1, CPU))
