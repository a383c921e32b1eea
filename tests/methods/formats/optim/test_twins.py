from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import optim
from actbench.errors import UsageError


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(64, 64))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9, nesterov=True), optim.SGD),
        (lambda groups: torch.optim.Adam(groups, lr=0.5, betas=(0.5, 0.9), maximize=True), optim.Adam),
        (lambda groups: torch.optim.Adam(groups, lr=0.5, decoupled_weight_decay=True), optim.AdamW),
        (lambda groups: torch.optim.AdamW(groups, lr=0.5, eps=1e-3, foreach=True), optim.AdamW),
    ],
)
def test_a_twin_has_the_same_groups_and_options(made, kind) -> None:
    first, second = matrix(), matrix()
    groups = [{"params": [("first", first)], "weight_decay": 0.5, "layer": 3}, {"params": [("second", second)]}]
    theirs = made(groups)
    ours = optim.packed(theirs, "int:6", seed=7)

    assert type(ours) is kind
    for group, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]
        shared = expected.keys() - {"foreach", "fused", "capturable", "differentiable", "amsgrad"}
        assert {key: group[key] for key in shared - {"params", "decoupled_weight_decay"}} == {
            key: expected[key] for key in shared - {"params", "decoupled_weight_decay"}
        }
        assert (group["encoding"], group["seed"]) == ("int:6", 7)
    assert ours.param_groups[0]["layer"] == 3
    assert ours.defaults["lr"] == 0.5


def test_the_twin_steps_near_the_original() -> None:
    start, gradients = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(5)]
    ends = []
    for pack in (lambda o: o, optim.packed):
        parameter = nn.Parameter(start.clone())
        optimizer = pack(torch.optim.AdamW([parameter], lr=1e-2))
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameter.detach() - start)
    assert 0 < (ends[0] - ends[1]).norm() < 0.1 * ends[0].norm()


def test_what_has_no_twin_is_refused_with_the_reason() -> None:
    stepped = torch.optim.SGD([matrix()], lr=0.1, momentum=0.9)
    stepped.param_groups[0]["params"][0].grad = torch.ones(64, 64)
    stepped.step()
    scheduled = torch.optim.AdamW([matrix()])
    torch.optim.lr_scheduler.StepLR(scheduled, step_size=1)
    hooked = torch.optim.AdamW([matrix()])
    hooked.register_step_post_hook(lambda *_: None)
    both = torch.optim.Adam([{"params": [matrix()], "decoupled_weight_decay": True}, {"params": [matrix()]}])

    class Mine(torch.optim.AdamW):
        pass

    for optimizer, message in [
        (torch.optim.RMSprop([matrix()]), r"no packed torch.optim.rmsprop.RMSprop; there are packed SGD, Adam, AdamW"),
        (Mine([matrix()]), "no packed .*Mine"),
        (torch.optim.AdamW([matrix()], amsgrad=True), "amsgrad=True is not supported"),
        (torch.optim.AdamW([matrix()], capturable=True), "capturable=True is not supported"),
        (torch.optim.SGD([matrix()], differentiable=True), "differentiable=True is not supported"),
        (torch.optim.AdamW([matrix().double().detach().requires_grad_()]), "a parameter is torch.float64"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "a parameter is torch.complex64"),
        (stepped, r"has state already; pack a fresh optimizer"),
        (scheduled, "a scheduler holds on to the optimizer"),
        (hooked, "hooks of steps are registered"),
        (both, "decoupled_weight_decay differs between groups"),
    ]:
        with pytest.raises(UsageError, match=message):
            optim.packed(optimizer)


def test_what_is_packed_is_not_packed_again():
    packed = optim.packed(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    with pytest.raises(UsageError, match="packed already"):
        optim.packed(packed)
