"""What a step under a scheme computes and saves."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.measuring.bench import measure
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.packing import savedtensors
from actbench.scheme.composed import parts_in
from actbench.scheme.facets import LossyForward, Packs
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.testing.subject import (
    Subject,
    distance,
    flat,
    gradients,
    loss_of,
    plain_gradient,
    plain_trace,
    small_batch,
)

ROUNDING = 1e-5
"""Relative distance of two gradients that are equal to rounding."""
DRAWS = 100
MOST_ERRORS = 1.5
"""Standard errors that the mean of the draws may be off; it is a vector of thousands, whose norm varies little."""
LAST_WORDS = 4 + 4
"""Bytes: codes are rounded up to a word at most, and the last group has metadata of its own."""
TOLERANCE = 0.02
_OF_SITES = "bytes_before", "bytes_after"
_NONE = re.compile("second derivative|double backward|create_graph=False|derivative for .* is not implemented")


def forward(subject: Subject) -> None:
    """Check the loss under the random numbers of the plain model."""
    exact, found = loss_of(subject.plain(), subject.batch), loss_of(subject.changed(), subject.batch)
    lossy = subject.scheme.facet(LossyForward) is not None
    if "loss" in subject.scheme.changes and not lossy:
        if not torch.allclose(found, exact, rtol=ROUNDING):
            raise AssertionError(f"the loss is {found:.8f}, and {exact:.8f} without")
        return
    if not lossy and not torch.equal(found, exact):
        raise AssertionError(
            f"the loss is {found:.8f}, and {exact:.8f} without the scheme: declare a LossyForward among the facets, or "
            "compute the same; numbers drawn from torch's generator change the masks of dropout (draw noise by "
            "actbench.ops.noise)"
        )
    draws_equal = all(
        part.card.draws_alike for part in parts_in(subject.scheme)
    )  # else masks alone may be what differs
    if lossy and draws_equal and torch.equal(found, exact):
        raise AssertionError("a LossyForward is declared, and the loss is exact to the bit")


def gradient(subject: Subject) -> None:
    """Check the gradients of one step."""
    setup = subject.changed()
    draws_equal = subject.scheme.gradient != "exact" or all(part.card.draws_alike for part in parts_in(subject.scheme))
    found = gradients(setup, subject.batch, dropout=draws_equal)
    missing = [name for name, p in setup.module.named_parameters() if p.requires_grad and name not in found]
    if missing:
        raise AssertionError(f"{len(missing)} parameters have no gradient, such as {missing[0]}")
    bad = [name for name, each in found.items() if not each.isfinite().all()]
    if bad:
        raise AssertionError(f"the gradients of {len(bad)} of {len(found)} parameters are not finite, such as {bad[0]}")
    if subject.scheme.gradient == "exact" and not subject.trains_others:
        off = distance(flat(found), plain_gradient(subject.case, draws_equal))
        if not off < ROUNDING:
            raise AssertionError(f"declared exact, and {off:.2e} of the exact gradient's norm away from it")


def mean_gradient(subject: Subject) -> None:
    """Check that the mean of n draws is nearer to the exact gradient than one draw by the root of n."""
    networks = subject.networks()
    if subject.scheme.gradient != "unbiased" or subject.trains_others or not networks:
        return
    plain, changed = networks
    batch = small_batch(plain)
    exact = flat(gradients(plain, batch))
    for seed in range(3):  # until bits are allocated
        gradients(changed, batch, seed)
    draws = torch.stack([flat(gradients(changed, batch, seed)) for seed in range(DRAWS)])
    one = float((draws - exact).norm(dim=1).mean() / exact.norm())
    off, error = distance(draws.mean(0), exact), one / DRAWS**0.5
    if not off < max(MOST_ERRORS * error, ROUNDING):
        raise AssertionError(
            f"declared unbiased, and the mean gradient of {DRAWS} draws is {off:.2e} of the exact one's norm away, "
            f"where its standard error is {error:.2e}"
        )


def second_derivative(subject: Subject) -> None:
    """Check the gradient of a squared gradient: a packed tensor has lost its graph."""
    networks = subject.networks()
    if subject.trains_others or not {"precision", "gradients"}.isdisjoint(subject.scheme.changes):
        return
    if not networks:
        return
    plain, changed = networks
    batch = small_batch(plain)
    wanted = _penalty(plain, batch)
    try:
        found = _penalty(changed, batch)
    except RuntimeError as error:
        if not _NONE.search(str(error)):
            raise AssertionError(f"the refusal does not say that there is no second derivative: {error}") from error
    else:
        off = distance(found, wanted)
        if not off < 1e-4:
            raise AssertionError(f"{off:.2e} of its norm away from the exact one, and not refused")


def _penalty(setup: TrainingSetup, batch: Batch) -> Tensor:
    parameters = [p for p in setup.module.parameters() if p.requires_grad]
    first = torch.autograd.grad(setup.forward(batch), parameters, create_graph=True)
    squares = torch.stack([each.square().sum() for each in first]).sum()
    second = torch.autograd.grad(squares, parameters, materialize_grads=True)
    return torch.cat([each.flatten().double() for each in second])


def saved_bytes(subject: Subject) -> None:
    """Check that a step saves less, by fake tensors, or by the allocator if these do not show it."""
    changed = subject.changed()
    if subject.untraceable:
        before, after = (CpuMeter().memory(TrainStep(each, subject.batch)) for each in (subject.plain(), changed))
        was, found = before.activation_bytes, after.activation_bytes
    else:
        plain, trace = plain_trace(subject.case), inspection.trace(changed, lambda: subject.batch)
        was, found = plain.total_bytes, trace.total_bytes
        listed = inspection.itemize(changed, lambda: subject.batch).total_bytes
        if listed != found:
            raise AssertionError(f"the ledger lists {listed:,} bytes of the {found:,} that are saved")
    if not subject.saves_less:
        return
    if not changed.sites:
        raise AssertionError("no site says what was changed; give them to setup.changed")
    if found >= was:
        raise AssertionError(f"{found:,} bytes are saved, and {was:,} without the scheme")
    if subject.untraceable:
        return
    sites, _ = inspection.inspect(plain, trace, changed)
    before_sites, after_sites = (sum(getattr(site, name) or 0 for site in sites) for name in _OF_SITES)
    if after_sites >= before_sites:
        raise AssertionError(f"the modules at its sites save {after_sites:,} bytes, and {before_sites:,} without it")


def packed_bytes(subject: Subject) -> None:
    """Check the storages of packed tensors in a real forward pass, and the bits that the scheme claims."""
    setup = subject.changed()
    others = {savedtensors.source_of(storage) for storage in savedtensors.packed_storages()}
    with savedtensors.observing():
        loss = setup.forward(subject.batch)
        stored: defaultdict[savedtensors.Source, int] = defaultdict(int)
        for storage in savedtensors.packed_storages():
            source = savedtensors.source_of(storage)
            if source is not None and source not in others and source.packed_bytes is not None:
                stored[source] += storage.nbytes()
        for source, found in stored.items():
            if found != source.packed_bytes:
                raise AssertionError(
                    f"{source.dtype} {tuple(source.shape)} is packed in {found:,} bytes, and the codec's packed_bytes "
                    f"says {source.packed_bytes:,}"
                )
    del loss
    packs = subject.scheme.facet(Packs)
    if packs is None or subject.untraceable:
        return
    entries = [each for each in inspection.itemize(setup, lambda: subject.batch).entries if each.packed]
    if not entries:
        raise AssertionError(f"{packs.bits:g} bits are claimed, and nothing is packed")
    for entry in entries:
        elements = torch.Size(entry.shape).numel()
        excess = elements * (entry.bits - packs.bits) / 8
        if not 0 <= excess < LAST_WORDS:
            raise AssertionError(f"{entry.module} takes {entry.bits:g} bits, and {packs.bits:g} are claimed")


def simulation(subject: Subject) -> None:
    """Check that the simulated peak, with the operators of a CPU, is the real one."""
    if subject.unsimulated:
        return
    case = subject.case.model_copy(update={"scheme": subject.scheme.spec, "batch_size": 4 * subject.case.batch_size})
    measured = measure(case.model_copy(update={"min_steps": 0, "min_seconds": 0.0}))
    simulated = measure(case.model_copy(update={"meter": "simulated", "device_profile": "cpu"}))
    off = simulated.peak_bytes / measured.peak_bytes - 1
    if not abs(off) < TOLERANCE:
        raise AssertionError(
            f"the simulated peak is {simulated.peak_bytes:,} bytes, {off:+.1%} of the measured {measured.peak_bytes:,}"
        )


def compilation(subject: Subject) -> None:
    """Check the gradients of a compiled network: by one draw if they are the same in each, else by their mean."""
    networks = subject.networks()
    if not networks or not subject.is_of_model or subject.trains_others:
        return
    plain, changed = networks
    batch = small_batch(plain)
    like = flat(gradients(changed, batch))
    torch._dynamo.reset()
    run: Any = torch.compile(changed.module, backend="aot_eager")
    try:
        draws = torch.stack([_compiled(changed, run, batch) for _ in range(DRAWS)])
    except Exception as error:  # a compiler wraps what a model raises
        if ConversionError.__name__ not in message_of(error):
            raise AssertionError(f"it fails under torch.compile, without a reason: {message_of(error)}") from error
        return
    finally:
        torch._dynamo.reset()
    if distance(draws[0], draws[1]) > ROUNDING:  # random
        like = flat(gradients(plain, batch))
    one = float((draws - like).norm(dim=1).mean() / like.norm())
    off = distance(draws.mean(0), like)
    if not off < max(MOST_ERRORS * one / DRAWS**0.5, 1e-4):
        raise AssertionError(f"compiled, the mean gradient is {off:.2e} of its norm away")


def _compiled(setup: TrainingSetup, run: Any, batch: Batch) -> Tensor:
    setup.module.zero_grad()
    assert setup.loss is not None
    setup.loss(run, batch).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten().double() for p in setup.module.parameters() if p.grad is not None])
