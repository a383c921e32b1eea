from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.workload.base import Workload


def load(model: str, **fields: object) -> Workload:
    return workloads.load_workload(Case(model=model, batch_size=2, **fields))  # type: ignore[arg-type]


def test_depth_counts_the_layers_with_weights_on_the_main_path() -> None:
    module = load("resnet-cifar@depth=14,width=4").setup(materialize=True, seed=0).module
    shortcuts = {id(m) for name, m in module.named_modules() if "shortcut" in name}
    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear) and id(m) not in shortcuts]

    assert len(layers) == 14
    assert layers[0].stride == (1, 1)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("resnet-cifar@depth=8,width=4,channels=1,num_classes=3", (2, 1, 8, 8)),
        ("resnet18-cifar@width=4", (2, 3, 8, 8)),
        ("inception-cifar@channels=1,num_classes=3", (2, 1, 8, 8)),
    ],
)
def test_a_step_trains_every_parameter(model: str, shape: tuple[int, ...]) -> None:
    workload = load(model, image_size=8)
    setup, batch = workload.setup(materialize=True, seed=0), workload.batch(2, seed=0)

    setup.forward(batch).backward()  # type: ignore[no-untyped-call]

    assert batch["images"].shape == shape
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in setup.module.parameters())


def test_inception_sees_small_pictures_whole() -> None:
    module = load("inception-cifar").setup(materialize=True, seed=0).module.eval()
    sizes: list[tuple[int, ...]] = []
    for name in ("Mixed_5b", "Mixed_6b", "Mixed_7b"):
        module.get_submodule(name).register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape[1:])))

    with torch.no_grad():
        scores = module(torch.randn(1, 3, 32, 32))

    assert sizes == [(192, 32, 32), (768, 15, 15), (1280, 7, 7)]  # 299 px give 35, 17 and 8 in torchvision's
    assert scores.shape == (1, 10)


def test_weights_follow_the_seed() -> None:
    first, same, other = (
        load("resnet-cifar@depth=8,width=4").setup(materialize=True, seed=seed).module.conv.weight for seed in (0, 0, 1)
    )

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("resnet-cifar@depth=9", "6n . 2"),
        ("resnet-cifar@widht=9", "did you mean width"),
        ("resnet18-cifar@depth=8", "has no key 'depth'"),
        ("resnet-cifar@width=0", "whole number from 1"),
        ("inception-cifar@width=8", "has no key 'width'"),
        ("resnet-cifa", "did you mean resnet-cifar"),
    ],
)
def test_what_cannot_be_built_is_refused(model: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        load(model)


def test_published_weights_and_other_tasks_are_refused() -> None:
    with pytest.raises(ModelError, match="none are published"):
        load("resnet-cifar", weights="pretrained")
    with pytest.raises(ModelError, match="image-classification"):
        load("resnet-cifar", task="causal-lm")
