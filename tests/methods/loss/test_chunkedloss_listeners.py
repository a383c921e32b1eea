"""Whoever listens to the gradients of deferred logits, in whatever way, sees those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional as F
from torch.nn.modules import module as everywhere

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.methods.loss import crossentropy
from actbench.methods.loss.deferred import DeferredTensor
from actbench.scheme.setup import TrainingSetup

CLASSES = 50


class Model(nn.Module):
    """A language model of two layers that returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(CLASSES, 24), nn.Linear(24, 24), nn.Linear(24, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(self.embed(ids))))
        return logits


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].reshape(-1))


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    capped = (torch.tanh(logits / 2.0) * 2.0).double()
    return F.cross_entropy(capped[:, 1:, :CLASSES].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels) + 2 * plain(logits, labels)


def with_another_term(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()


LOSSES = [plain, shifted, capped, twice, with_another_term]
Seen = list[Tensor]
Step = Callable[[Any, Callable[[Tensor], Tensor]], Any]
"""Runs a step of a model with a loss of its logits, and returns what it saw."""

IDS, LABELS = torch.randint(CLASSES, (2, 3, 7), generator=torch.Generator().manual_seed(1))


def a_hook(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    logits = model(IDS)
    logits.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss(logits).backward()
    return seen


def changed(change: Callable[[Tensor], Tensor]) -> Step:
    def step(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
        logits = model(IDS)
        logits.register_hook(change)
        loss(logits).backward()
        return []

    return step


def a_hook_after_the_loss(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    logits = model(IDS)
    amount = loss(logits)
    logits.register_hook(lambda gradient: seen.append(gradient * 1.5) or gradient.abs())  # type: ignore[func-returns-value]
    amount.backward()
    return seen


def retained(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    amount = loss(logits)
    logits.retain_grad()
    amount.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [logits.grad]


def a_hook_of_its_node(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    logits = model(IDS)
    logits.grad_fn.register_prehook(lambda gradients: seen.extend(each.clone() for each in gradients))
    logits.grad_fn.register_hook(lambda _, gradients: seen.extend(each.clone() for each in gradients))
    loss(logits).backward()
    return seen


def a_hook_of_a_node_behind_the_loss(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    amount = loss(model(IDS))
    node = amount.grad_fn
    while "View" not in node.name():
        node = next(following for following, _ in node.next_functions if following is not None)
    node.register_prehook(lambda gradients: seen.extend(each.clone() for each in gradients))
    amount.backward()  # type: ignore[no-untyped-call]
    return seen


def a_hook_of_several(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    logits = model(IDS)
    register_multi_grad_hook([logits], lambda gradients: seen.extend(each.clone() for each in gradients))  # type: ignore[misc, arg-type]
    loss(logits).backward()
    return seen


def asked(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    return [*torch.autograd.grad(loss(logits), [logits, model.head.weight])]


def asked_by_edge(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    return [*torch.autograd.grad(loss(logits), [get_gradient_edge(logits)])]


def as_inputs(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    loss(logits).backward(inputs=[logits, model.middle.weight])
    return [logits.grad]


def detached(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS).detach().requires_grad_()
    logits.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", leaf.grad * 2))
    loss(logits).backward()
    loss(logits).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [logits.grad]


def sent_on_by_hand(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    leaf = logits.detach()
    leaf.requires_grad = True
    loss(leaf).backward()
    logits.backward(leaf.grad)
    return [leaf.grad]


def a_gradient_of_ones_own(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    logits = model(IDS)
    logits.backward(torch.linspace(-1, 1, logits.numel()).view(logits.shape))
    return []


def without_a_graph(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    amount = loss(model(IDS).detach())
    assert not amount.requires_grad
    return [amount]


@contextmanager
def _hooks(register: Callable[..., Any], seen: Seen) -> Iterator[None]:
    handle = register(lambda _, *given: seen.extend(each.clone() for each in sum(given, ()) if each is not None))
    try:
        yield
    finally:
        handle.remove()


def hooks_of_all_modules(model: Any, loss: Callable[[Tensor], Tensor]) -> Seen:
    seen: Seen = []
    with (
        _hooks(everywhere.register_module_full_backward_hook, seen),
        _hooks(everywhere.register_module_full_backward_pre_hook, seen),
    ):
        loss(model(IDS)).backward()
    return seen


HOOKS = [a_hook, a_hook_after_the_loss, a_hook_of_its_node, a_hook_of_a_node_behind_the_loss, a_hook_of_several]
ASKED = [retained, asked, asked_by_edge, as_inputs, hooks_of_all_modules]
ALONE = [detached, sent_on_by_hand, a_gradient_of_ones_own, without_a_graph]
STEPS = [*HOOKS, *ASKED, *ALONE, changed(lambda gradient: 3 * gradient), changed(lambda gradient: gradient.flip(0))]


def in_pieces(exact: nn.Module) -> nn.Module:
    return schemes.build("chunked_loss:4,head=head").apply(TrainingSetup(copy.deepcopy(exact))).module


def result(model: nn.Module, step: Step, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Seen, list[Tensor | None]]:
    seen = step(model, lambda logits: loss(logits, LABELS))
    return [each + 0 for each in seen], [p.grad for p in model.parameters()]


def assert_alike(exact: nn.Module, found: nn.Module, step: Step, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    (wanted, gradients), (seen, others) = result(exact, step, loss), result(found, step, loss)
    assert len(seen) == len(wanted)
    for one, other in zip([*seen, *others], [*wanted, *gradients], strict=True):
        assert (one is None) is (other is None)
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("step", STEPS)
def test_what_is_seen_and_what_arrives_is_that_of_the_plain_model(step: Step, loss: Any) -> None:
    exact = Model()
    assert_alike(exact, in_pieces(exact), step, loss)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("where", ["head", ""])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("loss", [shifted, with_another_term])
def test_hooks_of_modules_act_whenever_they_are_registered(kind: str, where: str, before: bool, loss: Any) -> None:
    """The hook of a layer that changes its gradient, before or after the model is converted."""

    def hooked(model: nn.Module) -> nn.Module:
        getattr(model.get_submodule(where), kind)(
            lambda _, *given: tuple(3 * each for each in given[0] if each is not None) or None
        )
        return model

    exact = Model()
    converted = in_pieces(hooked(copy.deepcopy(exact))) if before else hooked(in_pieces(exact))
    exact = hooked(exact)
    assert_alike(exact, converted, lambda model, loss: loss(model(IDS)).backward() or [], loss)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_forward_pass_may_listen_and_change_logits(before: bool) -> None:
    seen: Seen = []

    def listen(_: Any, inputs: Any, logits: Tensor) -> Tensor:
        logits.register_hook(lambda gradient: seen.append(gradient + 0))
        return logits * 0.5

    def hooked(model: nn.Module) -> nn.Module:
        model.get_submodule("head").register_forward_hook(listen)
        return model

    exact = Model()
    converted = in_pieces(hooked(copy.deepcopy(exact))) if before else hooked(in_pieces(exact))
    assert_alike(hooked(exact), converted, lambda model, loss: loss(model(IDS)).backward() or [], shifted)
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("loss", [plain, shifted, capped, twice])
def test_the_gradient_of_the_logits_is_not_computed_for_who_does_not_look(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    computed: list[int] = []
    monkeypatch.setattr(crossentropy.Slopes, "values", lambda self: computed.append(1))
    logits = in_pieces(Model())(IDS)
    logits.register_hook(seen.append)
    loss(logits, LABELS).backward()

    assert not computed
    assert isinstance(seen[0], DeferredTensor)


def test_a_gradient_that_is_read_after_the_optimizers_step_is_refused() -> None:
    seen: list[Tensor] = []
    model = in_pieces(Model())
    logits = model(IDS)
    logits.register_hook(seen.append)
    plain(logits, LABELS).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(ConversionError, match=r"gradients of the logits are needed after .* read or clone them there"):
        seen[0].norm()


def test_a_gradient_that_a_hook_writes_to_is_refused() -> None:
    logits = in_pieces(Model())(IDS)
    logits.register_hook(lambda gradient: gradient.mul_(2))

    with pytest.raises(ConversionError, match="gradients of the logits are changed in place"):
        plain(logits, LABELS).backward()  # type: ignore[no-untyped-call]
