import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from actbench.errors import KernelError
from actbench.ops import noise


def numbers(generator):
    return [
        torch.rand(700, generator=generator),
        torch.randn(1, generator=generator),
        torch.randint(10, (1300,), generator=generator),
        torch.rand(30, dtype=torch.float64, generator=generator),
    ]


@pytest.mark.parametrize("used", [0, 1, 2, 622, 623, 624, 625, 1247, 1248, 5000])
def test_drawing_a_seed_changes_no_number_of_the_generator(used):
    plain, drawn = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    torch.rand(used, generator=plain)
    torch.rand(used, generator=drawn)
    for _ in range(3):
        noise.draw(drawn)

    assert all(torch.equal(a, b) for a, b in zip(numbers(plain), numbers(drawn), strict=True))


@pytest.mark.parametrize("used", [0, 1, 5000])
def test_branches_give_other_seeds_and_the_same_numbers(used):
    found = []
    for branch in range(5):
        generator = torch.Generator().manual_seed(7)
        noise.diverge(generator, branch)
        torch.rand(used, generator=generator)
        found.append((noise.draw(generator), numbers(generator)))
    plain = torch.Generator().manual_seed(7)
    torch.rand(used, generator=plain)

    assert len({seed for seed, _ in found}) == 5
    assert found[0][0] == noise.draw(plain)
    for _, drawn in found:
        assert all(torch.equal(a, b) for a, b in zip(drawn, found[0][1], strict=True))


def test_seeds_are_fresh():
    drawn = [noise.fresh_seed().item() for _ in range(500)]

    assert len(set(drawn)) == 500


def test_seeds_follow_manual_seed_at_once_and_again():
    def three(seed):
        torch.manual_seed(seed)
        return [noise.fresh_seed().item() for _ in range(3)]

    assert three(0) == three(0)
    assert not set(three(0)) & set(three(1))


def test_seeds_follow_a_restored_and_a_forked_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        inside = noise.fresh_seed()
    after = noise.fresh_seed()
    torch.set_rng_state(state)

    assert inside == after == noise.fresh_seed()


def test_seeds_differ_after_other_draws():
    torch.manual_seed(0)
    first = noise.fresh_seed()
    torch.manual_seed(0)
    torch.rand(1)

    assert noise.fresh_seed() != first


def test_a_seed_can_be_drawn_in_a_fake_tensor_mode():
    with FakeTensorMode():
        seed = noise.fresh_seed()

    assert isinstance(seed, FakeTensor)
    assert (seed.shape, seed.dtype, seed.device.type) == ((), torch.int64, "cpu")


def test_another_layout_of_the_generator_is_noticed(monkeypatch):
    monkeypatch.setattr(noise, "_UNUSED", (1 << 32) - 1)
    monkeypatch.setattr(noise, "_BLOCK", noise._BLOCK + 400)

    with pytest.raises(KernelError, match="not laid out"):
        noise._check_layout.__wrapped__()


def test_no_seed_is_drawn_for_a_graph_that_is_replayed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    with pytest.raises(KernelError, match="while a CUDA graph is captured"):
        noise.fresh_seed()


def join_as_second_of_two():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())


@pytest.fixture
def second_of_two():
    join_as_second_of_two()
    yield
    torch.distributed.destroy_process_group()


def seed_after(number):
    torch.manual_seed(number)
    return int(noise.fresh_seed())


@pytest.mark.usefixtures("second_of_two")
def test_a_process_that_computes_the_same_as_another_draws_the_same():
    own = seed_after(5)
    noise.draw_as(0)
    shared = seed_after(5)
    torch.distributed.destroy_process_group()
    alone = seed_after(5)
    join_as_second_of_two()

    assert shared == alone != own
    assert seed_after(5) == own  # what was said was of the process group of then


def of_a_pass(count, number=5):
    torch.manual_seed(number)
    with noise.drawn_once():
        return [int(noise.fresh_seed()) for _ in range(count)]


def test_a_pass_draws_once_and_its_seeds_are_the_words_of_that_draw(monkeypatch):
    drawn = []
    monkeypatch.setattr(noise, "draw", lambda generator, draw=noise.draw: drawn.append(draw(generator)) or drawn[-1])
    noise._check_layout()
    drawn.clear()
    seeds = of_a_pass(150)

    assert len(drawn) == 1
    assert seeds == noise.words(drawn[0], 0, 150, torch.device("cpu")).tolist()
    assert len(set(seeds)) == 150


def test_seeds_of_passes_follow_manual_seed_and_differ_from_pass_to_pass():
    first, again, other = of_a_pass(3), of_a_pass(3), of_a_pass(3, number=6)
    with noise.drawn_once():
        later = int(noise.fresh_seed())

    assert first == again
    assert len({*first, *other, later}) == 7


def test_a_pass_inside_a_pass_goes_on_with_its_seeds():
    torch.manual_seed(5)
    with noise.drawn_once():
        outer = int(noise.fresh_seed())
        with noise.drawn_once():
            inner = int(noise.fresh_seed())
        last = int(noise.fresh_seed())

    assert [outer, inner, last] == of_a_pass(3)


def test_a_forked_generator_inside_a_pass_brings_no_seed_again():
    def forked():
        with noise.drawn_once(), torch.random.fork_rng(devices=[]):
            return int(noise.fresh_seed())

    torch.manual_seed(5)

    assert forked() != forked()


@pytest.mark.usefixtures("second_of_two")
def test_ranks_that_are_seeded_alike_have_other_seeds_in_a_pass():
    own = of_a_pass(3)
    torch.distributed.destroy_process_group()
    alone = of_a_pass(3)
    join_as_second_of_two()

    assert not set(own) & set(alone)


def test_no_seed_of_a_pass_is_used_in_a_graph_that_is_replayed(monkeypatch):
    with noise.drawn_once():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(KernelError, match="while a CUDA graph is captured"):
            noise.fresh_seed()
