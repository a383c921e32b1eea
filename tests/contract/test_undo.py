"""What every scheme that ``convert`` takes promises: it can be taken off again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actbench
from actbench import workload as workloads
from actbench.errors import ConversionError
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.tools.convert.model import conversion_of

STACKS = ["lora:4+chunked_loss:2+checkpoint", "fewbit:3+randomized:0.5+gact:L1"]


def language_model() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    case = Case(model="tiny-gpt2", batch_size=2, sequence_length=16)
    workload = workloads.load_workload(case)
    setup, batch = workload.setup(materialize=True, seed=0), workload.batch(2, seed=0)
    assert setup.loss is not None
    loss: Callable[[nn.Module, Batch], Tensor] = setup.loss
    return setup.module, lambda model: loss(model, batch)


def pictures(width: int = 8) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, width, 3), *block, nn.GELU(), nn.Flatten(), nn.Linear(8 * 8 * width, 4))
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    return model, lambda model: model(images).square().mean()


def tables(model: nn.Module) -> list[dict[str, Any]]:
    """Return what stands on the modules of a model: their classes, attributes, children, hooks and flags."""
    found: list[dict[str, Any]] = []
    for path, module in model.named_modules():
        found.append({"path": path, "class": type(module), **vars(module)})
        found += [dict(value) for value in vars(module).values() if isinstance(value, dict)]
    return [*found, {name: parameter.requires_grad for name, parameter in model.named_parameters()}]


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    torch.manual_seed(1)
    found = loss(model)
    found.backward()  # type: ignore[no-untyped-call]
    return found.detach(), [parameter.grad for parameter in model.parameters()]


def train(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 2) -> None:
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(steps):
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def check_plain(model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Assert that a model computes as a plain one that is given its weights."""
    plain.load_state_dict(model.state_dict())
    (one, of_one), (other, of_other) = gradients(model, loss), gradients(plain, loss)
    assert torch.equal(one, other)
    assert [gradient is None for gradient in of_one] == [gradient is None for gradient in of_other]
    assert all(torch.equal(a, b) for a, b in zip(of_one, of_other, strict=True) if a is not None and b is not None)
    assert list(model.state_dict()) == list(plain.state_dict())


def undone(model: nn.Module) -> nn.Module:
    conversion = conversion_of(model)
    assert conversion is not None
    return conversion.undo()


@pytest.mark.parametrize("spec", STACKS)
def test_a_language_model_is_what_it_was_after_training_under_a_stack(spec: str) -> None:
    model, loss = language_model()
    plain, before = copy.deepcopy(model), tables(model)
    converted = actbench.convert(model, spec)
    train(converted, loss)

    assert undone(converted) is model
    assert tables(model) == before
    check_plain(model, plain, loss)


@pytest.mark.parametrize("spec", ["actnn", "division", "dropit", "fewbit:3", "gact", "lora:2", "offload", "randomized"])
def test_a_network_of_pictures_keeps_the_statistics_that_it_has_learned(spec: str) -> None:
    model, loss = pictures()
    plain, before = copy.deepcopy(model), tables(model)
    converted = actbench.convert(model, spec)
    train(converted, loss)
    statistics = converted.state_dict()["2.running_mean"].clone()
    undone(converted)

    assert tables(model) == before
    assert torch.equal(model.state_dict()["2.running_mean"], statistics)
    check_plain(model, plain, loss)


def test_weights_trained_under_the_scheme_stay_and_adapters_go() -> None:
    for spec, stays in (("fewbit:3", True), ("lora:4", False)):
        model, loss = language_model()
        start = [parameter.clone() for parameter in model.parameters()]
        train(actbench.convert(model, spec), loss)
        undone(model)

        assert all(parameter.requires_grad for parameter in model.parameters())
        same = [torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True)]
        assert all(same) is not stays


def test_what_was_frozen_before_stays_frozen() -> None:
    model, _ = language_model()
    model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    actbench.convert(model, "lora:4")

    assert [parameter.requires_grad for parameter in undone(model).parameters()] == flags


def test_a_model_that_was_replaced_as_a_whole_is_given_back_with_its_flag() -> None:
    layer = nn.Linear(8, 8)
    converted = actbench.convert(layer, "randomized:0.5")
    converted.eval()

    assert converted is not layer
    assert undone(converted) is layer
    assert not layer.training
    assert conversion_of(converted) is None


@pytest.mark.parametrize("spec", ["fewbit:3+gact:L1+checkpoint", "lora:4", "chunked_loss:2"])
def test_a_copy_is_undone_by_itself(spec: str) -> None:
    model, loss = language_model()
    plain = copy.deepcopy(model)
    actbench.convert(model, spec)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        conversion = conversion_of(twin)
        undone(twin)

        assert conversion == conversion_of(model)
        assert conversion_of(twin) is None
        assert [type(module) for module in twin.modules()] == [type(module) for module in plain.modules()]
        check_plain(twin, copy.deepcopy(plain), loss)

    assert conversion_of(model) is not None
    check_plain(undone(model), plain, loss)


def test_a_second_time_there_is_nothing_to_undo_and_the_model_can_be_converted_again() -> None:
    model, loss = language_model()
    actbench.convert(model, "fewbit:3")
    conversion = conversion_of(model)
    assert conversion is not None
    assert conversion.undo() is model
    assert conversion.undo() is model

    actbench.convert(model, "gact:L1")
    gradients(model, loss)
    undone(model)
    assert conversion_of(model) is None


def test_a_graph_of_before_can_still_be_differentiated() -> None:
    model, loss = language_model()
    actbench.convert(model, "actnn:L1")
    found = loss(model)
    undone(model)
    found.backward()  # type: ignore[no-untyped-call]

    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_that_stands_inside_of_another_module_now_is_refused_until_it_is_back() -> None:
    model, loss = pictures()
    plain = copy.deepcopy(model)
    actbench.convert(model, "fewbit:3")
    converted = model[3]  # type: ignore[index]
    model[3] = nn.Sequential(converted)  # type: ignore[index, operator]
    with pytest.raises(
        ConversionError, match="cannot be removed from Sequential: another module has since wrapped the scheme's"
    ):
        undone(model)
    assert type(model[4]) is nn.GELU  # type: ignore[index]
    assert conversion_of(model) is not None

    model[3] = converted  # type: ignore[index, operator]
    check_plain(undone(model), plain, loss)


def test_weights_of_four_bits_are_not_what_they_were_and_the_refusal_says_so() -> None:
    model, _ = language_model()
    actbench.convert(model, "qlora:4")
    before = tables(model)

    with pytest.raises(ConversionError, match=r"'qlora:4' cannot be undone: it stores .*weight \(\d+ in all\)"):
        undone(model)
    assert tables(model) == before
    assert conversion_of(model) is not None
