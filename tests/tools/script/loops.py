"""Training loops of many shapes: which passes and updates are one step differs in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import actbench
from actbench.optim import StepInBackward

WIDTH, ROWS = 128, 64
ROUNDS = 12


def net(layers: int = 4, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def adam(parameters: Iterator[nn.Parameter], kind: type[Adam] = AdamW) -> Adam:
    """One parameter at a time, as simulated CPUs do."""
    return kind(parameters, lr=1e-3, foreach=False)


def passed(model: nn.Module, rows: int = ROWS) -> Tensor:
    """Return the loss of a forward and a backward pass."""
    loss: Tensor = model(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    return loss


def stepped(*optimizers: Optimizer) -> None:
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()


def plain() -> None:
    model = net()
    optimizer = adam(model.parameters())
    for _ in range(ROUNDS):
        passed(model)
        stepped(optimizer)


def step_in_backward() -> None:
    model = net(12)
    optimizer = StepInBackward(adam(model.parameters()))
    for _ in range(ROUNDS):
        passed(model)
        stepped(optimizer)


def release() -> None:
    setup = actbench.TrainingSetup(
        net(12),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        make_optimizer=lambda model: adam(model.parameters()),
    )
    step = actbench.TrainStep(actbench.apply(setup, "release"))
    for _ in range(ROUNDS):
        step.batch = {"x": torch.randn(ROWS, WIDTH)}
        step()


def hooks_of_parameters() -> None:
    """As torch's tutorial steps inside of the backward pass: no optimizer steps outside of it."""
    model = net(12)
    optimizers = {each: adam(iter([each])) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        stepped(optimizers[parameter])  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for _ in range(ROUNDS):
        passed(model)


def hooks_beside_an_optimizer() -> None:
    model = net(12)
    inside, after = list(model[:8].parameters()), adam(model[8:].parameters())
    optimizers = {each: adam(iter([each])) for each in inside}
    for each in inside:
        each.register_post_accumulate_grad_hook(lambda parameter: stepped(optimizers[parameter]))
    for _ in range(ROUNDS):
        passed(model)
        stepped(after)


def dummy_first() -> None:
    """An optimizer steps once and never again."""
    model, extra = net(), nn.Parameter(torch.zeros(4))
    first = SGD([extra], lr=0.1)
    extra.sum().backward()
    first.step()
    optimizer = adam(model.parameters())
    for _ in range(6):
        passed(model, 256)
        stepped(optimizer)


def rates_tested() -> None:
    """Schedules are drawn by steps without gradients, of an optimizer that never trains and of the one that does."""
    model = net()
    never, optimizer = SGD([nn.Parameter(torch.zeros(4))], lr=0.1), adam(model.parameters())
    for _ in range(20):
        stepped(never, optimizer)
    for _ in range(ROUNDS):
        passed(model)
        stepped(optimizer)


def warmed_up() -> None:
    """One optimizer takes three steps, and then another goes on."""
    model = net()
    first, second = SGD(model.parameters(), lr=0.1), adam(model.parameters())
    for number in range(ROUNDS):
        passed(model)
        stepped(first if number < 3 else second)


def head_first() -> None:
    model = net()
    for layers in (1, 4):
        part = model[4 - layers :]
        optimizer = adam(part.parameters())
        for _ in range(2 if layers == 1 else ROUNDS):
            passed(model)
            stepped(optimizer)


def made_anew() -> None:
    """Each round has an optimizer of its own, and all are kept."""
    model, kept = net(), []
    for _ in range(40):
        kept.append(SGD(model.parameters(), lr=0.1))
        passed(model)
        stepped(kept[-1])


def accumulated() -> None:
    model = net()
    optimizer = adam(model.parameters())
    for _ in range(ROUNDS):
        for _ in range(3):
            passed(model)
        stepped(optimizer)


def of_two_kinds() -> None:
    """Two optimizers after one backward pass, and one that nobody uses."""
    model, unused = net(), nn.Linear(WIDTH, WIDTH)
    optimizers = [
        adam(each for each in model.parameters() if each.dim() == 2),
        adam((each for each in model.parameters() if each.dim() == 1), Adam),
        adam(unused.parameters()),
    ]
    for _ in range(ROUNDS):
        passed(model)
        stepped(*optimizers[:2])


def adversarial() -> None:
    maker, judge = net(6), net(2)
    optimizers = [adam(each.parameters()) for each in (maker, judge)]
    for _ in range(ROUNDS):
        judge(maker(torch.randn(ROWS, WIDTH)).detach()).square().mean().backward()
        stepped(optimizers[1])
        judge(maker(torch.randn(ROWS, WIDTH))).mean().backward()
        stepped(optimizers[0])
        optimizers[1].zero_grad()


def critic(turns: int = 5) -> None:
    """A critic has five turns in a row, and then comes the large generator."""
    maker, judge = net(8), net(1)
    optimizers = [adam(each.parameters()) for each in (maker, judge)]
    for number in range(1, 6 * turns):
        judge(torch.randn(ROWS, WIDTH)).mean().backward()
        stepped(optimizers[1])
        if number % turns == 0:
            judge(maker(torch.randn(ROWS, WIDTH))).mean().backward()
            stepped(optimizers[0])
            optimizers[1].zero_grad()


def by_turns() -> None:
    """Odd rounds train one half, even rounds the other; both halves always run."""
    model = net(6)
    optimizers = [adam(model[:2].parameters()), adam(model[2:].parameters())]
    for number in range(2 * ROUNDS):
        passed(model)
        stepped(optimizers[number % 2])
        model.zero_grad()


def by_closures() -> None:
    model = net(2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=2, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return passed(model)

    for _ in range(ROUNDS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def by_closures_of_a_trainer() -> None:
    """Both passes run inside of the update, as Lightning's do, and an optimizer waits that nobody uses."""
    model = net()
    optimizer, _unused = adam(model.parameters()), adam(net(1).parameters())

    def closure() -> float:
        optimizer.zero_grad()
        return float(passed(model).detach())

    for _ in range(ROUNDS):
        optimizer.step(closure)


class SharpnessAware(Optimizer):
    """Holds another optimizer, which steps for it: its own step is never called."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moved"] = parameter.grad.clone()
            parameter.add_(parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.state[parameter].pop("moved"))
        stepped(self.base)


def sharpness_aware() -> None:
    model = net()
    optimizer = SharpnessAware(adam(model.parameters()))
    for _ in range(ROUNDS):
        passed(model)
        optimizer.climb()
        passed(model)
        optimizer.descend()


def recomputed_in_backward() -> None:
    model = net(6)
    optimizer = adam(model.parameters())
    for _ in range(ROUNDS):
        x = torch.randn(4 * ROWS, WIDTH, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=True)  # type: ignore[assignment]
        x.square().mean().backward()
        stepped(optimizer)


def gradients_by_hand() -> None:
    """No backward pass at all."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer, _unused = adam(iter([weight])), adam(net(1).parameters())
    for _ in range(ROUNDS):
        with torch.no_grad():
            x = torch.randn(4 * ROWS, WIDTH)
            weight.grad = x.t() @ (x @ weight)
        del x
        stepped(optimizer)


def learned_inside() -> None:
    """Each round trains a copy for two steps by an optimizer of its own, and then the model itself."""
    model, copied = net(), net()
    optimizer = adam(model.parameters())
    for _ in range(2 * ROUNDS):
        copied.load_state_dict(model.state_dict())
        inner = SGD(copied.parameters(), lr=0.1)
        for _ in range(2):
            passed(copied)
            stepped(inner)
        passed(model, 3 * ROWS)
        stepped(optimizer)


def updates_by_hand() -> None:
    model = net()
    for _ in range(110):
        model.zero_grad()
        passed(model)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)


LOOPS: dict[Callable[[], None], int] = {
    plain: 1,
    step_in_backward: 1,
    release: 1,
    hooks_of_parameters: 1,
    hooks_beside_an_optimizer: 1,
    dummy_first: 1,
    rates_tested: 1,
    warmed_up: 1,
    head_first: 1,
    made_anew: 1,
    accumulated: 3,
    of_two_kinds: 1,
    adversarial: 2,
    critic: 2,
    by_turns: 2,
    by_closures: 4,
    by_closures_of_a_trainer: 1,
    sharpness_aware: 2,
    recomputed_in_backward: 1,
    gradients_by_hand: 0,
    updates_by_hand: 1,
    learned_inside: 2,
}
"""The loops, and the backward passes of their last step."""
