"""What a calibration runs: training steps of models, from small ones under every scheme to large layers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ActbenchError, is_out_of_memory, message_of
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep
from actbench.tools.calibrate.stopwatch import Clock, Sample, Stopwatch
from actbench.workload.base import moved

_SPENT = 0.12
"""Seconds of timed steps of one size."""
_ENOUGH = 2
"""Models on which a scheme is measured."""


class Model(NamedTuple):
    """Settings of a case, and batch sizes of its steps; a card computes those of ``on_cuda``, too."""

    settings: dict[str, Any]
    sizes: tuple[int, ...]
    on_cuda: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The model without its settings."""
        return str(self.settings["model"]).partition("@")[0]

    def steps(self, spec: str, device: torch.device) -> Iterator[TrainStep]:
        """Yield the step of each size; an ActbenchError if the scheme finds nothing in the model to work on."""
        case = Case(**self.settings, scheme=spec, batch_size=1, meter="cuda" if device.type == "cuda" else "cpu")
        workload = workloads.load_workload(case)
        exact = workload.setup(materialize=True, seed=0)
        exact.module.to(device)
        setup = schemes.build(spec).apply(exact)
        for size in self.sizes + self.on_cuda * (device.type == "cuda"):
            yield TrainStep(setup, moved(workload.batch(size, seed=0), device))


_WIDE = "num_hidden_layers=1,hidden_size=192,num_attention_heads=3,intermediate_size=768"
_IMAGES: dict[str, Any] = {"optimizer": "sgd-momentum"}
ENCODER = Model({"model": f"tiny-roberta@{_WIDE}", "sequence_length": 96}, (1, 20))
NETWORK = Model({"model": "resnet18", "image_size": 64, **_IMAGES}, (1, 12))
DECODER = Model({"model": f"tiny-llama@{_WIDE},num_key_value_heads=3", "sequence_length": 96}, (1, 20))
SMALL = (ENCODER, NETWORK, DECODER)
"""Models whose operators are measured under every scheme."""

_LAYER = Model({"model": "roberta-base@num_hidden_layers=1,vocab_size=8000", "sequence_length": 128}, (1, 4), (32,))
_BOTTLENECKS = Model({"model": "resnet50", **_IMAGES}, (2,), (64,))
_LARGE = (
    Model({"model": "resnet-cifar@depth=8,width=24", **_IMAGES}, (4, 24)),  # stays in the caches with small batches
    _LAYER,
    _BOTTLENECKS,
    Model({"model": "llama-160m@num_hidden_layers=1,vocab_size=4000", "sequence_length": 256}, (2,), (32,)),
    Model({"model": "swin_t", **_IMAGES}, (1,), (32,)),  # its attention has no fused kernel
    Model({"model": "mobilenet_v3_small", **_IMAGES}, (4,), (64,)),  # depthwise convolutions
    Model({"model": "regnet_y_400mf", **_IMAGES}, (2,), (64,)),  # convolutions with groups
)
"""Models whose tensors leave the caches between the passes, with operators of many shapes."""


@contextmanager
def noting(name: str, notes: list[str]) -> Iterator[None]:
    """Add a step that fails inside to the notes: a device lacks an operator, or a kernel cannot be compiled.

    That a scheme finds nothing in a model, or that memory ran out, is no failure. The exact model must not fail.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, ActbenchError) and not is_out_of_memory(error):
            if name.startswith("exact "):
                raise
            notes.append(f"Not measured, because it failed: {name}: {message_of(error)}.")


def plan(device: torch.device, specs: Sequence[str] | None = None) -> list[tuple[str, Sequence[Model]]]:
    """Return schemes with the models to run them on, the most important first; all schemes if ``specs`` is None.

    A processor may take minutes for a convolution in bfloat16, and runs half types last.
    """
    if specs is None:
        # schemes with operators that the exact model does not have; some need a value
        own = schemes.changing(("saved tensors", "optimizer", "gradients", "parameters", "precision"))
        own = sorted(own, key=schemes.changing(("precision",)).__contains__)
        values = {"encode": ("encode:bf16", "encode:s2fp8", "encode:int:8")}
        specs = [spec for name in own for spec in values.get(name, (name,))]
    exact = [("exact", (*SMALL, *_LARGE)), ("channels_last", (NETWORK, _BOTTLENECKS))]
    under_schemes = [(spec, SMALL) for spec in specs]
    if device.type == "cuda":
        return [*exact, ("pure", (_LAYER, _BOTTLENECKS)), ("pure+channels_last", (_BOTTLENECKS,)), *under_schemes]
    return [*exact, *under_schemes, ("pure", (_LAYER,))]


def run(
    planned: Sequence[tuple[str, Sequence[Model]]],
    device: torch.device,
    clock: Clock,
    end: float,
    progress: Callable[[str], None],
) -> tuple[list[Sample], list[str]]:
    """Run a plan, and return the operators of its steps, and notes of what was not measured.

    A scheme runs on the first two small models that it changes, and with a larger batch if it had new operators in the
    smaller one. Nothing begins after the moment ``end``.
    """
    samples: list[Sample] = []
    notes: list[str] = []
    known: set[tuple[str, str]] = set()
    for place, (spec, models) in enumerate(planned):
        is_scheme, ran = models is SMALL, set[str]()
        for model in models:
            if is_scheme and len(ran) == _ENOUGH:
                break
            name = f"{spec} on {model.name}"
            progress(name)
            with noting(name, notes):
                for step in model.steps(spec, device):
                    if time.monotonic() > end:
                        left = ", ".join(dict.fromkeys(spec for spec, _ in planned[place:]))
                        return samples, [*notes, f"The time ended before these were measured at every size: {left}."]
                    found = timed(step, device, clock)
                    samples += found
                    ran.add(name)
                    labels = {(each.work.label, each.work.precision) for each in found}
                    if is_scheme and labels <= known:
                        break
                    known |= labels
            gc.collect()
    return samples, notes


def timed(step: TrainStep, device: torch.device, clock: Clock) -> list[Sample]:
    """Return the operators of some steps, after one to warm up."""
    watch, found = Stopwatch(device, clock, lambda: step.phase), list[Sample]()
    step()
    names = {"watch": watch, "step": step, "found": found}
    timer = Timer("found.extend(watch.time(step))", globals=names, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=_SPENT)
    return found
