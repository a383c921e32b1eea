"""What a calibration runs: training steps of models, from small ones under every scheme to large layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from actbench import scheme as schemes, workload as workloads
from actbench.model.records import Case
from actbench.scheme.base import Change
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.workload.base import moved


class Subject(NamedTuple):
    """Training steps of a model under a scheme, at several batch sizes from small to large."""

    name: str
    step: Callable[[int], TrainStep]
    sizes: Sequence[int]


class Model(NamedTuple):
    """Settings of a case, and batch sizes of its steps; a card computes those of ``on_cuda``, too."""

    settings: dict[str, Any]
    sizes: tuple[int, ...]
    on_cuda: tuple[int, ...] = ()


_WIDE = "num_hidden_layers=1,hidden_size=192,num_attention_heads=3,intermediate_size=768"
_IMAGES: dict[str, Any] = {"optimizer": "sgd-momentum"}
ENCODER = Model({"model": f"tiny-roberta@{_WIDE}", "sequence_length": 96}, (1, 20))
NETWORK = Model({"model": "resnet18", "image_size": 64, **_IMAGES}, (1, 12))
DECODER = Model({"model": f"tiny-llama@{_WIDE},num_key_value_heads=3", "sequence_length": 96}, (1, 20))
SMALL = (ENCODER, NETWORK, DECODER)
"""Models whose operators are measured under every scheme."""

CACHED = Model({"model": "resnet-cifar@depth=8,width=24", **_IMAGES}, (4, 24))
"""A network whose tensors stay in the caches where batches are small."""

LAYER = Model({"model": "roberta-base@num_hidden_layers=1,vocab_size=8000", "sequence_length": 128}, (1, 4), (32,))
BOTTLENECKS = Model({"model": "resnet50", **_IMAGES}, (2,), (64,))
LARGE = (
    LAYER,
    BOTTLENECKS,
    Model({"model": "llama-160m@num_hidden_layers=1,vocab_size=4000", "sequence_length": 256}, (2,), (32,)),
    Model({"model": "swin_t", **_IMAGES}, (1,), (32,)),  # its attention has no fused kernel
    Model({"model": "mobilenet_v3_small", **_IMAGES}, (4,), (64,)),  # depthwise convolutions
    Model({"model": "regnet_y_400mf", **_IMAGES}, (2,), (64,)),  # convolutions with groups
)
"""Models whose tensors leave the caches between the passes, with operators of many shapes."""

WITH_OPERATORS: frozenset[Change] = frozenset(("saved tensors", "optimizer", "gradients", "parameters", "precision"))
"""Kinds of changes for which schemes run operators that the exact model does not have."""

NEEDING = {"encode": ("encode:bf16", "encode:s2fp8", "encode:int:8")}
"""Specifications of schemes that need a value."""


def of_models(device: torch.device) -> Iterator[Subject]:
    """Yield the steps that measure the operators of models: exact ones, and convolutions in the other format."""
    for model in (*SMALL, CACHED, *LARGE):
        yield stepping(device, model, "exact")
    for model in (NETWORK, BOTTLENECKS):
        yield stepping(device, model, "channels_last")


def of_halves(device: torch.device) -> Iterator[Subject]:
    """Yield the steps that measure large operators in bfloat16; a processor may take minutes for its convolutions."""
    yield stepping(device, LAYER, "pure")
    for spec in ("pure", "pure+channels_last") if device.type == "cuda" else ():
        yield stepping(device, BOTTLENECKS, spec)


def specs_of_schemes() -> list[str]:
    """Return a specification of every scheme with its own operators; those that change precision come last."""
    specs = [spec for name in schemes.scheme_names() for spec in NEEDING.get(name, (name,))]
    changes = {spec: schemes.build(spec).changes for spec in specs}
    found = [spec for spec in specs if not WITH_OPERATORS.isdisjoint(changes[spec])]
    return sorted(found, key=lambda spec: "precision" in changes[spec])


def stepping(device: torch.device, model: Model, spec: str) -> Subject:
    """Return the steps of a model under a scheme.

    The first step builds the model, and raises an ActbenchError if the scheme finds nothing in it to work on.
    """
    case = Case(**model.settings, scheme=spec, batch_size=1, meter="cuda" if device.type == "cuda" else "cpu")
    workload = workloads.load_workload(case)

    @functools.cache
    def setup() -> TrainingSetup:
        exact = workload.setup(materialize=True, seed=0)
        exact.module.to(device)
        return schemes.build(spec).apply(exact)

    def step(batch_size: int) -> TrainStep:
        return TrainStep(setup(), moved(workload.batch(batch_size, seed=0), device))

    sizes = model.sizes + model.on_cuda * (device.type == "cuda")
    return Subject(f"{spec} on {case.model.partition('@')[0]}", step, sizes)
