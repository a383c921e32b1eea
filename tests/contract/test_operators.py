"""Every operator of actbench is as torch wants it: schema, autograd, fake tensors, and compiled with any sizes.

On the CPU it allocates what a simulation counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocatedpeaks import allocated_peak
from torch import Tensor
from torch.utils._pytree import tree_map

from actbench import scheme as schemes
from actbench.methods.fewbit.ops.activate import FUNCTIONS
from actbench.methods.formats.ops.smaq.format import Format
from actbench.methods.formats.ops.smaqstep import rules
from actbench.methods.randomized.ops.matrix import KINDS
from actbench.ops.library import library
from actbench.simulator import profiles
from actbench.simulator.card import simulated
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker
from actbench.simulator.unmodelled import Unmodelled

schemes.scheme_names()  # imports all schemes, and with them all operators

Arguments = tuple[Any, ...]

CPU = torch.device("cpu")
SEED = torch.tensor(7)
BOUNDS, LEVELS = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.25, 0.5, 0.75, 1.0])
FORM = Format(6, 7, 64, 256)
ADAM = list(rules.adam_rule(1, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False))
SGD = list(rules.sgd_rule(1, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=False, maximize=False))
ops = torch.ops.actbench


def codes_of(x: Tensor) -> Tensor:
    return (x.flatten() > 0).to(torch.uint8)


def groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return ops.groupquant_encode(x.flatten(), 3, 256, SEED, True)  # type: ignore[no-any-return]


def two_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, bits = x.reshape(1, -1).repeat(2, 1), torch.tensor([3, 2], dtype=torch.int32)
    return rows, bits, *ops.groupquant_encode_rows(rows, bits, 5, 256, SEED, True)


def step(x: Tensor, moments: int) -> tuple[Tensor, ...]:
    """Return a parameter, its gradient and packed moments; state is packed of no float64."""
    x = x.flatten().float() if x.dtype == torch.float64 else x.flatten()
    return x, x.neg(), *(torch.zeros(FORM.packed_bytes(x.numel()), dtype=torch.uint8) for _ in range(moments))


EXAMPLES: dict[str, Callable[[Tensor], list[Arguments]]] = {
    "fresh_seed": lambda x: [(x,)],
    "fresh_sketch": lambda x: [(x.reshape(-1, 1), 3, "gaussian", x.dtype)],
    "from_host": lambda x: [(ops.to_host(x), CPU)],
    "groupquant_decode": lambda x: [(*groups(x), 3, 256, 0, x.numel(), x.dtype)],
    "groupquant_decode_": lambda x: [(torch.empty_like(x.flatten()), *groups(x), 3, 256, 0)],
    "batchnorm_backward": lambda x: [
        (
            dy.reshape(1, 1, -1),
            *groups(dy),
            3,
            256,
            *torch.rand(3, 1, dtype=torch.promote_types(x.dtype, torch.float32)),
        )
        for dy in [x.flatten()[: x.numel() // 4 * 4]]
        if dy.numel()  # no channel is empty: the operator refuses it
    ],
    "groupquant_decode_rows": lambda x: [
        (torch.empty_like(rows), codes, meta, bits, 256, 0) for rows, bits, codes, meta in [two_rows(x)]
    ],
    "groupquant_encode": lambda x: [(x.flatten(), 3, 256, SEED, True)],
    "groupquant_encode_": lambda x: [(*groups(x), x.flatten(), 3, 256, SEED, True)],
    "groupquant_encode_rows": lambda x: [(*two_rows(x)[:2], 5, 256, SEED, True)],
    "groupquant_words": lambda x: [(x.reshape(1, -1), 256)],
    "mask_select": lambda x: [(ops.relu_mask(x)[1], x)],
    "onegroup_decode": lambda x: [
        (*ops.onegroup_encode(x.flatten(), 3, SEED, True), 3, 0, x.numel(), x.dtype),
    ],
    "onegroup_encode": lambda x: [(x.flatten(), 3, SEED, True)],
    "pack_codes": lambda x: [(codes_of(x), 3)],
    "random_words": lambda x: [(SEED, 1, x.numel())],
    "relu_mask": lambda x: [(x,)],
    "relu_mask_": lambda x: [(x,)],
    "sketch_columns": lambda x: [(SEED, 1, 4, x.numel(), kind, x.dtype, copies) for kind in KINDS for copies in (1, 2)],
    "sketch_halves": lambda x: [(x.float().reshape(1, -1), 0.3)],
    "smaq_decode": lambda x: [(ops.smaq_encode(x.flatten(), SEED, True, *FORM), 0, x.numel(), x.dtype, *FORM)],
    "smaq_encode": lambda x: [(x.flatten(), SEED, True, *FORM)],
    "smaqstep_adam_": lambda x: [(*step(x, 2), 3, 256, ADAM, *FORM)],
    "smaqstep_sgd_": lambda x: [(*step(x, 1), 3, 0, SGD, *FORM)],
    "stepwise_activate": lambda x: [(x, function, BOUNDS, 2, False) for function in FUNCTIONS],
    "stepwise_decode": lambda x: [(ops.stepwise_encode(x, BOUNDS, 2, False), LEVELS, x, 2)],
    "stepwise_encode": lambda x: [(x, BOUNDS, 2, fold) for fold in (False, True)],
    "to_host": lambda x: [(x,)],
    "unpack_codes": lambda x: [(ops.pack_codes(codes_of(x), 3), 3, x.numel())],
}
"""From a tensor to the arguments of calls."""

ON_FAKE_TENSORS_ONLY = {"one_kernel"}
DRAWING = {"fresh_seed", "fresh_sketch"}  # two calls differ, so there is nothing to compare a compiled one with


def test_every_operator_has_an_example() -> None:
    registered = {name.partition("::")[2] for name in library._op_defs}

    assert registered == set(EXAMPLES) | ON_FAKE_TENSORS_ONLY


@pytest.mark.sampled(fast=30, slow=20)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (300,)), (torch.float16, (5, 7)), (torch.bfloat16, (0,)), (torch.float64, ())],
    ids=str,
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_operator_is_well_formed(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    checks = ("test_schema", "test_faketensor") if name in DRAWING else torch.library._OPCHECK_DEFAULT_UTILS
    for arguments in EXAMPLES[name](x):
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=checks)


SOME = 64
"""Bytes of numbers: offsets of rows, a seed."""

OF_PARTS = {"fresh_seed", "fresh_sketch"}
"""Operators for compilers; elsewhere their parts run, one by one."""

COMPOSED = {"onegroup_encode", "onegroup_decode", "sketch_halves"}
"""Operators whose parts of torch a simulation does not see: actnn with per_group=false, a comparison of the paper, and
halves, which products on a card alone are made of.
"""


def simulated_peak(name: str, arguments: Arguments) -> int:
    profile, mode = profiles.get("cpu"), fake_mode()
    tracker = StorageTracker(temporaries=Unmodelled(profile).temporaries)
    with simulated(profile), mode:
        fakes = tree_map(lambda each: mode.from_tensor(each) if isinstance(each, Tensor) else each, arguments)
        with tracker:
            getattr(ops, name).default(*fakes)
    return tracker.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - ON_FAKE_TENSORS_ONLY - OF_PARTS - COMPOSED))
def test_a_kernel_allocates_what_is_counted(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 7000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for arguments in EXAMPLES[name](x):
        if name == "sketch_columns":  # a product on a CPU asks for float32 alone, and once
            arguments = (*arguments[:-1], 1)
            arguments = tuple(torch.float32 if each is dtype else each for each in arguments)
        operator = getattr(ops, name).default
        operator(*arguments)  # compiles the kernel
        true = allocated_peak(lambda operator=operator, arguments=arguments: operator(*arguments))

        assert simulated_peak(name, arguments) <= true <= simulated_peak(name, arguments) + SOME


def test_float64_is_said_to_be_estimated() -> None:
    x, unmodelled = torch.randn(100, dtype=torch.float64), Unmodelled(profiles.get("cpu"))
    tracker = StorageTracker(temporaries=unmodelled.temporaries)
    mode = fake_mode()
    with simulated(profiles.get("cpu")), mode, tracker:
        ops.relu_mask(mode.from_tensor(x))

    assert ["float64" in reason for reason in unmodelled.reasons()] == [True]
