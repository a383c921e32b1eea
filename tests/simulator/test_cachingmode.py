"""The fake tensor mode that recalls what operators gave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from actbench.errors import ModelError
from actbench.ops import hostmemory
from actbench.simulator import foreach, known, profiles
from actbench.simulator.cachingmode import CachingFakeMode
from actbench.simulator.card import simulated


@pytest.fixture
def mode() -> Iterator[CachingFakeMode]:
    with CachingFakeMode() as active:
        yield active


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what torch's own mode runs from now on."""
    found: list[Any] = []
    run = FakeTensorMode.dispatch

    def noted(self: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(func)
        return run(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return found


def described(result: Any, given: tuple[Tensor, ...]) -> Any:
    """Return all that can be told of a result: of each tensor its layout, and whose storage it lies in."""
    if isinstance(result, list | tuple):
        return [type(result), *(described(leaf, given) for leaf in result)]
    if not isinstance(result, Tensor):
        return result
    storage = result.untyped_storage()
    owners = [place for place, tensor in enumerate(given) if tensor.untyped_storage()._cdata == storage._cdata]
    same = [place for place, tensor in enumerate(given) if tensor is result]
    flags = (result.requires_grad, result.is_leaf, result._is_view(), type(result), result.device, result._version)
    layout = (result.dtype, result.shape, result.stride(), result.storage_offset(), storage.nbytes())
    return (*layout, *flags, owners, same, torch._C._dispatch_key_set(result))


OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, w: x @ w,
    "sum of one dimension": lambda x, w: x.sum(0, keepdim=True),
    "transposed": lambda x, w: x.t(),
    "part": lambda x, w: x[1:, ::2],
    "several parts": lambda x, w: x.split(2),
    "chunks of the last dimension": lambda x, w: x.chunk(2, -1),
    "in place": lambda x, w: x.mul_(2.0),
    "into a result": lambda x, w: torch.add(x, 1.0, out=torch.empty_like(x)),
    "list in place": lambda x, w: torch._foreach_add_([x, w], 1.0),
    "list": lambda x, w: torch._foreach_sqrt([x, w]),
    "list of alike": lambda x, w: torch._foreach_addcmul(
        [x, w, x + 1, w], [x, w, x, w], [x, w, x, w], [1, 2.0, 1, 2.0]
    ),
    "list of alike in place": lambda x, w: torch._foreach_add_([x + 1, w + 1, x + 2], [x, w, x], alpha=2),
    "two results": lambda x, w: x.max(0),
    "halves": lambda x, w: x.to(torch.bfloat16),
    "the same type": lambda x, w: x.to(x.dtype),
    "reshaped with a copy": lambda x, w: x.t().reshape(-1),
    "reshaped": lambda x, w: x.reshape(-1),
    "expanded": lambda x, w: x[:, :1].expand(-1, 7),
    "normed": lambda x, w: torch.ops.aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5),
    "complex and back": lambda x, w: torch.view_as_complex(x.view(-1, 2)).conj().imag,
    "bytes": lambda x, w: x.view(torch.uint8),
    "made of none": lambda x, w: torch.zeros(3, 4),
    "random": lambda x, w: torch.dropout(x, 0.5, train=True),
}


@pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize(("rows", "columns"), [(6, 4), (2, 8)])
def test_what_is_recalled_is_what_an_operator_gives(mode: CachingFakeMode, run: Any, rows: int, columns: int) -> None:
    found = []
    for _ in range(3):
        given = torch.empty(rows, columns), torch.empty(columns, rows)
        found.append(described(run(*given), given))
    plain = FakeTensorMode(allow_non_fake_inputs=True)
    with plain:
        given = torch.empty(rows, columns), torch.empty(columns, rows)
        expected = described(run(*given), given)

    assert found == [expected] * 3


def test_an_operator_runs_once_for_arguments_that_are_alike(mode: CachingFakeMode, ran: list[Any]) -> None:
    given = [(torch.empty(4, 8), torch.empty(8, 2)) for _ in range(3)]
    ran.clear()
    for x, w in given:
        x @ w
        x.view(8, 4)
        torch._foreach_mul_([x, w], 0.5)

    assert ran.count(torch.ops.aten.mm.default) == 1
    assert ran.count(torch.ops.aten.view.default) == 1
    assert ran.count(torch.ops.aten._foreach_mul_.Scalar) == 1


def test_arguments_that_are_not_alike_run_again(mode: CachingFakeMode) -> None:
    x, counts = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.int64)

    assert (counts + 1).dtype == torch.int64
    assert (counts + 1.0).dtype == torch.float32
    assert torch.full((2,), 1).dtype == torch.int64
    assert torch.full((2,), True).dtype == torch.bool
    assert (x + 1).stride() == (8, 1)
    assert (torch.empty(8, 4).t() + 1).stride() == (1, 4)
    assert (x.to(torch.float64) + 1).dtype == torch.float64


def test_of_lists_one_place_of_each_form_runs(mode: CachingFakeMode) -> None:
    x, w = torch.empty(2, 3), torch.empty(3, 2)
    add = torch.ops.aten._foreach_add.List
    few = foreach.few(add, ([x, w, x + 1, w], [x, w, x, w]))
    assert few is not None
    assert few.places == [0, 1, 0, 1]
    assert [len(each) for each in few.args] == [2, 2]
    assert foreach.few(add, ([x, w], [x, w])) is None
    assert foreach.few(torch.ops.aten.add.Tensor, (x, x)) is None


def test_the_default_type_is_looked_at(mode: CachingFakeMode) -> None:
    counts = torch.empty(3, dtype=torch.int64)
    assert (counts / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (counts / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_flow_through_what_is_recalled(mode: CachingFakeMode) -> None:
    for _ in range(2):
        w = torch.nn.Parameter(torch.empty(8, 2))
        loss = (torch.empty(4, 8) @ w).view(2, 4).relu_().sum()
        loss.backward()

        assert loss.requires_grad
        assert w.grad is not None
        assert w.grad.shape == w.shape
        assert w.grad.untyped_storage()._cdata != w.untyped_storage()._cdata


def test_a_view_that_is_recalled_is_of_its_own_argument(mode: CachingFakeMode) -> None:
    x, y = torch.empty(4, 8), torch.empty(4, 8)
    first, second = x[1:], y[1:]

    assert first.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert second.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_arguments_that_are_one_tensor_are_not_alike_to_several(mode: CachingFakeMode) -> None:
    x, y, z = (torch.empty(4, 8) for _ in range(3))

    assert torch.add(x, x, out=x) is x
    assert torch.add(x, y, out=z) is z
    assert torch.add(x, y, out=y) is y
    assert torch.add(y, y, out=x) is x


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_is_recalled_can_be_copied_as_what_an_operator_gives(mode: CachingFakeMode) -> None:
    first, second = (torch.empty(4, 8) for _ in range(2))
    copies = [copy.deepcopy(torch.nn.Parameter(each)) for each in (first, second)]

    assert [each.shape for each in copies] == [first.shape] * 2
    assert len({each.untyped_storage()._cdata for each in (first, second, *copies)}) == 4
    assert {each.fake_mode for each in copies} == {mode}  # type: ignore[attr-defined]


def test_values_cannot_be_looked_at_ever(mode: CachingFakeMode) -> None:
    x = torch.empty(4)
    for _ in range(2):
        with pytest.raises(DataDependentOutputException):
            x.sum().item()


def test_numbers_that_the_mode_knows_are_read(mode: CachingFakeMode) -> None:
    assert [torch.tensor(number).item() for number in (2.0, 3.0, 2.0)] == [2.0, 3.0, 2.0]
    counter = torch.tensor(0.0)
    for _ in range(3):
        counter += 1
    assert counter.item() == 3.0


@pytest.mark.parametrize("value", [1.5, 3, 1j])
def test_scalars_are_made_as_by_torch_and_known_until_they_are_overwritten(
    mode: CachingFakeMode, ran: list[Any], value: Any
) -> None:
    first = torch.tensor(value)
    made_by_torch, again = len(ran), torch.tensor(value + value)
    assert len(ran) == made_by_torch == 1

    assert described(again, (first,)) == described(first, (again,))
    assert vars(again).keys() == vars(first).keys()
    assert again.item_memo in (None, value + value)
    assert (again.item_memo is None) == (first.item_memo is None)
    assert (first.item(), again.item()) == (value, value + value)
    assert again.mul_(torch.tensor(2)) is again
    assert again.item() == 2 * (value + value)
    again.copy_(torch.empty((), dtype=again.dtype))
    with pytest.raises(DataDependentOutputException):
        again.item()


def test_a_tensor_of_the_mode_stays_and_keeps_its_values(mode: CachingFakeMode) -> None:
    made = mode.from_tensor(torch.tensor([2, 3]))

    assert mode.from_tensor(made) is made
    assert made.ne(3).tolist() == [True, False]


@pytest.mark.parametrize("written", ["tensor", "view"])
def test_values_that_are_written_over_are_no_longer_held(mode: CachingFakeMode, written: str) -> None:
    state = torch.zeros(1024, dtype=torch.uint8)
    view = state.view(32, 32)
    values = [known.value_of(each) for each in (state, view)]
    assert all(value is not None and not value.any() for value in values)
    held = [ref(value) for value in values]
    del values

    if written == "tensor":
        state.copy_(torch.randn(1024))
    else:
        view.copy_(torch.randn(32, 32))

    assert known.value_of(state) is known.value_of(view) is None
    assert [each() for each in held] == [None, None]


def test_many_values_are_not_held_at_once(mode: CachingFakeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST_HELD_BYTES", known._Views.held_bytes + 3 * 2**20)
    states = [torch.zeros(2**20, dtype=torch.uint8) for _ in range(8)]
    held = [known.value_of(each) is not None for each in states]
    assert held == [True] * 4 + [False] * 4
    assert torch.tensor([2, 3]).tolist() == [2, 3], "small values are kept"

    del states
    assert known.value_of(torch.zeros(2**20, dtype=torch.uint8)) is not None


def test_a_view_of_a_known_tensor_is_known_however_much_is_held(
    mode: CachingFakeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.zeros(2**20, dtype=torch.uint8)
    monkeypatch.setattr(known, "MOST_HELD_BYTES", 0)
    base[:5].fill_(7)
    assert base[:7].tolist() == [7, 7, 7, 7, 7, 0, 0]


def test_what_is_moved_to_the_host_is_there_each_time(mode: CachingFakeMode) -> None:
    with simulated(profiles.get("t4")):
        moved = [hostmemory.to_host(torch.empty(16, device="cuda")) for _ in range(3)]

    assert [host.device.type for host in moved] == ["cpu"] * 3


def test_products_of_two_types_are_refused_each_time(mode: CachingFakeMode) -> None:
    x, half = torch.empty(4, 8), torch.empty(8, 2, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ModelError, match="float32 and bfloat16"):
            x @ half


def test_a_tensor_that_is_resized_has_its_new_bytes(mode: CachingFakeMode) -> None:
    for _ in range(2):
        x = torch.empty(4)
        x.untyped_storage().resize_(64)
        y = torch.empty(4)

        assert x.view(2, 2).untyped_storage().nbytes() == 64
        assert y.view(2, 2).untyped_storage().nbytes() == 16


def test_rows_of_a_loop_are_recalled_with_their_own_places() -> None:
    mode = CachingFakeMode()
    with mode:
        x = torch.empty(2, 9, 4)
        whole = torch.empty(3, 2, 9, 4)
        rows = [part.select(1, row) for part in (x, whole[1], whole[2]) for row in range(9)]
        known = len(mode._known)
        later = [part[:, row].flatten() for part in (x, whole[1], whole[2]) for row in range(2, 9)]
        back = [torch.ops.aten.select_backward(rows[0], [2, 9, 4], 1, row) for row in range(9)]
        with pytest.raises(IndexError):
            x.select(1, 9)

    real = torch.empty(3, 2, 9, 4)
    offsets = [part.select(1, row).storage_offset() for part in (real[0], real[1], real[2]) for row in range(9)]
    assert [row.storage_offset() for row in rows] == offsets
    assert {row.stride() for row in rows} == {real[0, :, 0].stride()}
    assert rows[9].untyped_storage() is whole.untyped_storage()
    assert len({id(row.untyped_storage()) for row in back}) == 9
    assert len(mode._known) - known <= 8  # four operators on each of two storages, and not one for each row
    assert later[0].shape == (8,)
