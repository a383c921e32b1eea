import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from actbench.errors import KernelError
from actbench.ops import noise

CPU = torch.device("cpu")


def seed():
    return int(noise.fresh_seed(torch.empty(0)))


def numbers(generator):
    return [
        torch.rand(700, generator=generator),
        torch.randn(1, generator=generator),
        torch.randint(10, (1300,), generator=generator),
        torch.rand(30, dtype=torch.float64, generator=generator),
    ]


@pytest.mark.parametrize("used", [0, 1, 2, 622, 623, 624, 625, 1247, 1248, 5000])
def test_a_mark_changes_no_number_of_the_generator(used):
    plain, marked = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    torch.rand(used, generator=plain)
    torch.rand(used, generator=marked)
    marks = [noise.mark_seeded(marked)[1] for _ in range(3)]

    assert marked.initial_seed() == marks[-1]
    assert all(torch.equal(a, b) for a, b in zip(numbers(plain), numbers(marked), strict=True))


@pytest.mark.parametrize("used", [0, 1, 5000])
def test_branches_give_other_seeds_and_the_same_numbers(used):
    found = []
    for branch in range(5):
        generator = torch.Generator().manual_seed(7)
        noise.diverge(generator, branch)
        torch.rand(used, generator=generator)
        found.append((noise.mark_seeded(generator)[0], numbers(generator)))
    plain = torch.Generator().manual_seed(7)
    torch.rand(used, generator=plain)

    assert len({seed for seed, _ in found}) == 5
    assert found[0][0] == noise.mark_seeded(plain)[0]
    for _, drawn in found:
        assert all(torch.equal(a, b) for a, b in zip(drawn, found[0][1], strict=True))


def test_seeds_are_fresh():
    assert len({seed() for _ in range(500)}) == 500


def test_seeds_follow_manual_seed_at_once_and_again():
    def three(number):
        torch.manual_seed(number)
        return [seed() for _ in range(3)]

    assert three(0) == three(0)
    assert not set(three(0)) & set(three(1))


def test_a_restored_generator_brings_no_seed_again():
    torch.manual_seed(0)
    found, state = [seed()], torch.get_rng_state()
    for _ in range(3):
        with torch.random.fork_rng(devices=[]):
            found.append(seed())
        torch.set_rng_state(state)
        found.append(seed())

    assert len(set(found)) == 7


def test_what_is_seeded_in_a_fork_draws_alike_and_what_is_around_it_anew():
    torch.manual_seed(0)
    inside, around = [], []
    for _ in range(3):
        around.append(seed())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            inside.append(seed())

    assert len(set(inside)) == 1
    assert len({*inside, *around}) == 4


def test_seeds_differ_after_other_draws():
    torch.manual_seed(0)
    first = seed()
    torch.manual_seed(0)
    torch.rand(1)

    assert seed() != first


def test_a_seed_can_be_drawn_in_a_fake_tensor_mode():
    with FakeTensorMode():
        seed = noise.fresh_seed(torch.empty(3))

    assert isinstance(seed, FakeTensor)
    assert (seed.shape, seed.dtype, seed.device.type) == ((), torch.int64, "cpu")


def test_another_layout_of_the_generator_is_noticed(monkeypatch):
    monkeypatch.setattr(noise, "_UNUSED", (1 << 32) - 1)
    monkeypatch.setattr(noise, "_BLOCK", noise._BLOCK + 400)

    with pytest.raises(KernelError, match="not laid out"):
        noise._check_layout.__wrapped__()


def test_a_generator_that_keeps_no_mark_is_noticed(monkeypatch):
    monkeypatch.setattr(noise, "_SEED", noise._BLOCK + 400)

    with pytest.raises(KernelError, match="not laid out"):
        noise._check_layout.__wrapped__()


def test_seeds_go_on_while_a_graph_is_captured_and_never_begin_then(monkeypatch):
    """What is captured is done again at each replay: a beginning would bring the same seeds."""
    torch.manual_seed(0)
    before = seed()
    monkeypatch.setattr(noise, "captures", lambda: True)
    torch.manual_seed(0)
    with noise.drawn_once():
        inside = [seed() for _ in range(3)]
    after = seed()
    monkeypatch.setattr(noise, "captures", lambda: False)

    assert len({before, *inside, after}) == 5
    assert seed() == before


def test_the_first_seed_of_a_device_is_not_drawn_while_a_graph_is_captured(monkeypatch):
    seed()
    monkeypatch.setattr(noise, "captures", lambda: True)

    with pytest.raises(KernelError, match="run a step before the capture"):
        noise._seeds.take(torch.device("cuda", 5), 1)


class Replayed(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that change seeds, and runs them again, as a CUDA graph does with what it was captured of."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, result))
        return result

    def again(self):
        made = {}
        for func, args, kwargs, result in self.noted:
            given = [made.get(id(each), each) if isinstance(each, torch.Tensor) else each for each in args]
            made[id(result)] = func(*given, **kwargs)
        return made


def test_the_operators_of_a_draw_give_other_seeds_when_they_run_again(monkeypatch):
    seed()
    monkeypatch.setattr(torch._C, "_DisableTorchDispatch", lambda: torch.no_grad())
    with Replayed() as replayed:
        first = noise._seeds.take(CPU, 3)
    found = [first.tolist()] + [replayed.again()[id(first)].tolist() for _ in range(3)]

    assert len({each for three in found for each in three}) == 12
    assert not any("item" in str(func) or "local_scalar" in str(func) for func, *_ in replayed.noted)


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
    return seed()


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
        return [seed() for _ in range(count)]


def test_the_seeds_of_a_pass_are_numbers_behind_each_other():
    seeds = of_a_pass(150)

    assert [each - seeds[0] for each in seeds] == list(range(150))


def test_no_pass_after_the_first_looks_at_the_generator(monkeypatch):
    first = of_a_pass(3)
    monkeypatch.setattr(noise, "mark_seeded", None)
    with noise.drawn_once():
        assert seed() not in first


def test_seeds_of_passes_follow_manual_seed_and_differ_from_pass_to_pass():
    first, again, other = of_a_pass(3), of_a_pass(3), of_a_pass(3, number=6)
    with noise.drawn_once():
        later = seed()

    assert first == again
    assert len({*first, *other, later}) == 7


def test_a_pass_inside_a_pass_goes_on_with_its_seeds():
    torch.manual_seed(5)
    with noise.drawn_once():
        outer = seed()
        with noise.drawn_once():
            inner = seed()
        last = seed()

    assert [outer, inner, last] == of_a_pass(3)


def test_a_run_goes_on_with_the_seeds_that_were_saved():
    torch.manual_seed(5)
    with noise.drawn_once():
        seed()
    state, generator = noise.saved_seeds(), torch.get_rng_state()
    with noise.drawn_once():
        expected = [seed() for _ in range(3)]
    torch.manual_seed(6)
    seed()
    torch.set_rng_state(generator)
    noise.restore_seeds(state)
    with noise.drawn_once():
        assert [seed() for _ in range(3)] == expected


def test_to_save_seeds_changes_none_of_those_that_come_outside_of_a_pass():
    def three():
        return [seed() for _ in range(3)]

    torch.manual_seed(5)
    whole = [three(), three(), three()]
    torch.manual_seed(5)
    found = [three()]
    state, generator = noise.saved_seeds(), torch.get_rng_state()
    found.append(three())
    torch.manual_seed(6)
    seed()
    torch.set_rng_state(generator)
    noise.restore_seeds(state)

    assert found == whole[:2]
    assert [three(), three()] == whole[1:]


@pytest.mark.usefixtures("second_of_two")
def test_ranks_that_are_seeded_alike_have_other_seeds_in_a_pass():
    own = of_a_pass(3)
    torch.distributed.destroy_process_group()
    alone = of_a_pass(3)
    join_as_second_of_two()

    assert not set(own) & set(alone)
