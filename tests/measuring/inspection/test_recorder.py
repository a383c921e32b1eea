"""Nodes of autograd's graph are of the module whose forward pass made them."""

from __future__ import annotations

import threading

import torch
from torch import nn

from actbench.measuring.inspection.recorder import RunningModules


def test_what_another_thread_recomputes_moves_no_node() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    modules = RunningModules(model)
    made: dict[str, torch.autograd.graph.Node] = {}
    paths = {child: path for path, child in model.named_children()}

    def note(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.grad_fn is not None:
            made.setdefault(paths[module], output.grad_fn)

    for child in paths:
        child.register_forward_hook(note)
    for _ in range(50):
        model(x)  # so that this thread has counted further than a fresh one
    made.clear()

    with modules.watching():
        model(x)
        recomputing = threading.Thread(target=lambda: [model(x) for _ in range(5)])
        recomputing.start()
        recomputing.join()

    assert {path: modules.made_node(node._sequence_nr()) for path, node in made.items()} == {
        "0": "0",
        "1": "1",
        "2": "2",
    }
    assert modules.calls["1"] == 6
