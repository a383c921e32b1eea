from __future__ import annotations

import json
import math
from collections import OrderedDict

import pytest
import torch

from actbench.errors import StoreError
from actbench.tools.train.checkpoint import put_together, take_apart


def test_a_tree_survives_json_exactly() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1], "amsgrad": False}],
        "tensor": math.pi,  # a key that looks like one of the file's own
    }
    tensors: dict[str, torch.Tensor] = {}

    found = put_together(json.loads(json.dumps(take_apart(tree, tensors, "optimizer"))), tensors)

    assert torch.equal(found["state"][0].pop("exp_avg"), tree["state"][0].pop("exp_avg"))  # type: ignore[index]
    assert found == tree
    assert sorted(tensors) == ["optimizer.state.0.exp_avg", "optimizer.state.0.step"]


def test_what_neither_json_nor_a_tensor_says_is_refused() -> None:
    with pytest.raises(StoreError, match=r"optimizer.state: a set cannot be written"):
        take_apart(OrderedDict(state={1}), {}, "optimizer")
