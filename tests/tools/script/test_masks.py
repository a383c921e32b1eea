"""Masks of unknown values: how many elements they choose, as a real run with equal shares shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from test_loops import peak_of_the_whole
from torch import Tensor, nn

import actbench
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation
from actbench.tools.script.values.ones import shares

EXPERTS, TOKENS = 8, 512
Parts = Iterator[tuple[int, Tensor]]


def by_equality(chosen: Tensor) -> Parts:
    for expert in range(EXPERTS):
        yield expert, torch.where(chosen == expert)[0]


def by_masks(chosen: Tensor) -> Parts:
    for expert, mask in enumerate(F.one_hot(chosen, EXPERTS).t()):
        yield expert, mask.nonzero()[:, 0]


def by_hits(chosen: Tensor) -> Parts:
    """As transformers does it for Mixtral."""
    masks = F.one_hot(chosen, num_classes=EXPERTS).permute(1, 0)
    for hit in torch.greater(masks.sum(dim=-1), 0).nonzero():
        yield int(hit[0]), torch.where(masks[hit].squeeze(0))[0]


def by_histogram(chosen: Tensor) -> Parts:
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    yield from enumerate(chosen.argsort().split(counts))


def by_float_histogram(chosen: Tensor) -> Parts:
    counts = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).int().tolist()
    yield from enumerate(chosen.argsort().split(counts))


def by_scatter(chosen: Tensor) -> Parts:
    """As DeepSeek's own code does it."""
    counts = chosen.new_zeros((len(chosen), EXPERTS)).scatter_(1, chosen[:, None], 1).sum(dim=0)
    ends = counts.cumsum(0).tolist()
    order = chosen.argsort()
    for expert, end in enumerate(ends):
        yield expert, order[ends[expert - 1] if expert else 0 : end]


def by_sums(chosen: Tensor) -> Parts:
    counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add_(0, chosen, torch.ones_like(chosen))
    yield from enumerate(chosen.argsort().split(counts.tolist()))


def by_different_values(chosen: Tensor) -> Parts:
    _, counts = chosen.unique(return_counts=True)
    yield from enumerate(chosen.argsort().split(counts.tolist()))


ROUTES = (
    by_equality,
    by_masks,
    by_hits,
    by_histogram,
    by_float_histogram,
    by_scatter,
    by_sums,
    by_different_values,
)


class Routed(nn.Module):
    def __init__(self, route: Callable[[Tensor], Parts]) -> None:
        super().__init__()
        self.route, self.gate = route, nn.Linear(EXPERTS, EXPERTS, bias=False)
        nn.init.eye_(self.gate.weight)
        self.gate.requires_grad_(False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(EXPERTS, 256), nn.GELU(), nn.Linear(256, EXPERTS)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, tokens in self.route(self.gate(x).argmax(-1)):
            y = y.index_add(0, tokens, self.experts[expert](x[tokens]))
        return y


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_experts_share_the_tokens(route: Callable[[Tensor], Parts]) -> None:
    """The gate of the real run gives each expert as many tokens."""

    def loop() -> None:
        model = Routed(route)
        optimizer = torch.optim.SGD(model.experts.parameters(), lr=0.1, foreach=False)
        x = torch.eye(EXPERTS).repeat(TOKENS // EXPERTS, 1)
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with actbench.simulate("cpu") as card:
        loop()

    assert card.peak_bytes == pytest.approx(peak_of_the_whole(loop), rel=0.02)
    assert bool(card.bounds.most) == (route is by_different_values)  # some experts might be chosen by no token


def test_a_mask_has_as_many_elements_as_were_set() -> None:
    """As torchvision samples regions: some of those that a threshold chooses."""
    with Simulation(profiles.get("rtx-4090")) as card:
        scores = nn.Linear(4, 1).cuda()(torch.randn(1000, 4, device="cuda"))[:, 0]
        masks = []
        for chosen in (scores > 0.5, scores <= 0.5):
            some = torch.where(chosen)[0]
            mask = torch.zeros_like(chosen, dtype=torch.uint8)
            mask[some[torch.randperm(len(some), device="cuda")[:30]]] = 1
            masks.append(mask)

        assert len(torch.where(masks[0])[0]) == 30
        assert len(torch.where(masks[0] | masks[1])[0]) == 60
        assert len(torch.cat(masks).nonzero()) == 60
        assert len(scores[masks[0].bool() & (scores > 0)]) == 30
        assert int(masks[0].sum()) == 30
        masks[0].fill_(1)
        assert len(torch.where(masks[0])[0]) == 1000
    assert card.bounds.most
    assert not card.bounds.shares


def test_shares_add_up() -> None:
    assert shares(10, 4) == [3, 3, 2, 2]
    with Simulation(profiles.get("rtx-4090")) as card:
        scores = nn.Linear(4, 7).cuda()(torch.randn(1000, 4, device="cuda"))
        chosen = scores.topk(2).indices
        found = [len(torch.where(chosen == number)[0]) for number in range(7)]
        levels = torch.clamp(torch.floor(scores[:, 0]), min=2, max=5).to(torch.int64) - 2
        dealt = [len(torch.where(levels == number)[0]) for number in range(4)]
        weighted = (scores * (chosen == 3).any(1, keepdim=True)).sum()
    assert found == shares(2000, 7)
    assert dealt == [250, 250, 250, 250]
    assert card.bounds.shares
    assert weighted.shape == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*create_unbacked_symint.*:FutureWarning")  # torchvision's, of torch
def test_detectors_train_on_the_regions_of_their_sampler() -> None:
    """It keeps 512 of each picture, and at most 128 of them are positive."""
    detection = pytest.importorskip("torchvision.models.detection")
    rows = {}
    with Simulation(profiles.get("rtx-4090")):
        model = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=256).cuda()
        for name in ("box_head", "mask_head"):
            model.roi_heads.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: rows.update({name: len(args[0])})
            )
        corner = 100 * torch.rand(7, 2, device="cuda")
        target = {
            "boxes": torch.cat([corner, corner + 50], 1),
            "labels": torch.randint(1, 5, (7,), device="cuda"),
            "masks": torch.ones(7, 256, 256, dtype=torch.uint8, device="cuda"),
        }
        model([torch.rand(3, 256, 256, device="cuda") for _ in range(2)], [target, target])

    assert rows == {"box_head": 2 * 512, "mask_head": 2 * 128}


def test_masks_are_compared_with_tensors_and_seen_in_other_types() -> None:
    """Operators that take a number or a tensor, a shape or a type, are followed in both forms."""
    with actbench.simulate("rtx-4090") as card:
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            y = model(torch.randn(4, 8, device="cuda"))
            mask = (y > y.mean(0)) & (y >= y.amin(0))
            (y * mask.view(torch.uint8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert card.peak_bytes > 0
