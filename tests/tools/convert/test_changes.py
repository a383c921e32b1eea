from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench.errors import ConversionError
from actbench.packing.hooked import HookedForward
from actbench.tools.convert.changes import Changes, noting
from actbench.tools.convert.model import convert

SCHEMES = ["fewbit:3", "randomized:0.5", "actnn:L3", "gact:L2", "fewbit:3+randomized:0.5", "gact:L1+fewbit:2"]
Tables = Callable[[nn.Module], list[dict[str, Any]]]
Plain = Callable[[nn.Module], bool]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64)]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(64, 2))


def converted(model: nn.Module, spec: str) -> Changes:
    with noting(model) as changes:
        convert(model, spec)
    return changes


def output(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    found: Tensor = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    return found


@pytest.mark.parametrize("spec", SCHEMES)
def test_undone_for_good_or_for_a_while_the_model_is_what_it_was(spec: str, tables: Tables, is_plain: Plain) -> None:
    model = network()
    before = tables(model)
    changes = converted(model, spec)
    during = tables(model)
    assert during != before

    with changes.undone():
        assert tables(model) == before
        assert is_plain(model)
    assert tables(model) == during

    changes.undo()
    assert tables(model) == before
    assert is_plain(model)
    changes.undo()


@pytest.mark.parametrize("spec", SCHEMES)
def test_what_was_trained_meanwhile_stays(spec: str) -> None:
    model = network()
    parameters = list(model.parameters())
    changes = converted(model, spec)
    output(model).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(parameters, lr=0.1).step()
    model.eval()
    expected, state = output(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changes.undo()

    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(output(model), expected)


def test_what_others_did_meanwhile_stays() -> None:
    model = network()
    changes = converted(model, "fewbit:3")
    seen: list[str] = []
    model[0][1].register_forward_hook(lambda *_: seen.append("gelu"))  # type: ignore[index]
    model[0][3] = nn.Tanh()  # type: ignore[index, operator]
    model.note = "kept"  # type: ignore[assignment]
    model.double()
    changes.undo()
    model.double()(torch.zeros(4, 64, dtype=torch.float64))

    assert (seen, model.note) == (["gelu"], "kept")
    assert [type(layer) for layer in model[0]][:4] == [nn.Linear, nn.GELU, nn.BatchNorm1d, nn.Tanh]  # type: ignore[index, arg-type, union-attr]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_a_forward_that_others_put_in_front_is_refused_until_it_is_gone(is_plain: Plain) -> None:
    model = network()
    changes = converted(model, "gact:L1+fewbit:3")
    bound = model.forward
    model.forward = lambda x: bound(x)  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match="remove that one first"):
        changes.undo()
    assert type(model[0][1]) is nn.GELU  # type: ignore[index]

    model.forward = bound  # type: ignore[method-assign]
    assert HookedForward.of(model) is not None
    changes.undo()
    assert is_plain(model)


def test_nothing_is_lost_when_the_block_without_the_scheme_fails() -> None:
    model = network()
    changes = converted(model, "gact:L1")
    with pytest.raises(ZeroDivisionError), changes.undone():
        raise ZeroDivisionError
    assert HookedForward.of(model) is not None


def test_hooks_keep_their_order() -> None:
    model, seen = network(), []
    with noting(model) as changes:
        model.register_forward_hook(lambda *_: seen.append("ours"))
    model.register_forward_hook(lambda *_: seen.append("theirs"))
    with changes.undone():
        output(model)
    output(model)
    changes.undo()
    output(model)

    assert seen == ["theirs", "ours", "theirs", "theirs"]
