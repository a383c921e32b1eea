"""One training forward on fake tensors, watched by a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from actbench import fake, savedtensors
from actbench.inspection.recorder import Recorder
from actbench.training import Batch, TrainingSetup


@contextmanager
def traced(setup: TrainingSetup, make_batch: Callable[[], Batch]) -> Iterator[tuple[Recorder, Tensor]]:
    """Run one training forward of a setup on fake tensors; what it keeps lives as long as the context.

    The model keeps its weights, flags and random state: parameters and buffers are fake for the time of the call.

    Args:
        setup: The model, on any device, with its loss; its parameters may already be fake.
        make_batch: Makes the batch; called with the fake tensor mode active, so that no memory is used.

    Yields:
        What was seen, and the loss with its graph.

    Raises:
        UntraceableError: The forward looks at values, which fake tensors do not have.
    """
    module = setup.module
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_training(module))
        mode = fake.mode_of(module)
        if mode is None:
            mode = fake.fake_mode()
            stack.enter_context(fake.faked(module, mode))
        stack.enter_context(mode)
        batch = _on_device_of(module, make_batch())
        known = {"parameter": list(module.parameters()), "buffer": list(module.buffers()), "batch": dict(batch)}
        recorder = Recorder(module, known)
        yield recorder, _run(setup, batch, recorder)


def _run(setup: TrainingSetup, batch: Batch, recorder: Recorder) -> Tensor:
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda tensor: tensor)
    listening = savedtensors.listening(recorder.heard)
    with fake.shapes_only(), recorder.watching(setup.module), torch.enable_grad(), recorder, hooks, listening:
        return setup.forward(batch)


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Put a model into training mode and give every module its own flag back."""
    flags = {child: child.training for child in module.modules()}
    module.train()
    try:
        yield
    finally:
        for child, flag in flags.items():
            child.training = flag


def _on_device_of(module: nn.Module, batch: Batch) -> Batch:
    device = next((p.device for p in module.parameters()), None)
    if device is None:
        return batch
    moved: Batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(batch))
    return moved
