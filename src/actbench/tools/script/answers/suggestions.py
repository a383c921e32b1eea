"""What is worth trying on a script, by what its peak is made of: changes that cost nothing, and then schemes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from actbench.model.measured import GrowthKind, Measurement, PeakParts, Remedy, RemedyName, RunEvent
from actbench.model.timeline import Holder
from actbench.report.advice import needed_bytes
from actbench.units import format_bytes

MOST = 3
"""Most schemes that are suggested."""

_WORTH = 0.1
"""Share of the peak that a scheme has to save, at best, to be suggested."""

_ROOMY = 0.5
"""Share of the memory below which nothing is suggested."""

_ADAMS = ("Adam", "AdamW")
_LOGITS = re.compile(r"log_softmax|cross_entropy|nll_loss")
_ACTIVATION = re.compile(r"::(gelu|silu|sigmoid|tanh|mish|hardswish|elu|selu|softplus)\b")


class Suggestion(NamedTuple):
    """A scheme, why it is worth trying, and the bytes that it saves at best: what it costs is not known before."""

    scheme: str
    reason: str
    bytes_at_best: int


def has_room(measured: Measurement) -> bool:
    """Return whether all parts of a run need so little of the memory that steps could be larger."""
    limit = measured.memory_limit_bytes
    return limit is not None and run_bytes(measured) < _ROOMY * limit


def run_bytes(measured: Measurement) -> int:
    """Return what a step needs, or of a whole run its largest part."""
    return max((each.needed_bytes for each in measured.events), default=needed_bytes(measured))


_FREE: Mapping[RemedyName, str] = {
    "zero_grad": "gradients of the step before are alive in the forward pass: call optimizer.zero_grad() before it",
    "set_to_none": "gradients that are filled with zeros are alive in the forward pass: zero_grad(set_to_none=True)",
    "del": "what {} makes is alive at the peak, and nothing reads it any more: del it once it is used",
    "expandable_segments": "gaps between blocks: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "empty_cache": "blocks that training or the evaluation at {} has cached are of no use to the other: call "
    "torch.cuda.empty_cache() before and after it",
}


_KEPT: Mapping[GrowthKind | None, str] = {
    None: "keep .item() of a number and .detach().cpu() of a tensor, of what {} makes",
    "graph": "keep .item() or .detach() of a number, which leaves the graph of what {} makes",
    "cycle": "what {} makes waits in a reference cycle: an autograd.Function keeps tensors by ctx.save_for_backward",
}


def free_remedies(measured: Measurement) -> list[str]:
    """Return what saves memory at no cost, in sentences with the bytes; nothing where there is room for good."""
    growth, found = measured.growth, [] if has_room(measured) else _of_worst(measured)
    told = [*_of_evaluations(measured.events)]
    told += [f"{_FREE[each.kind].format(each.line)} (saves {format_bytes(each.saved_bytes)})" for each in found]
    if growth is not None and growth.line and (growth.is_lasting or not has_room(measured)):
        kept = _KEPT.get(growth.kind, _KEPT[None]).format(growth.line)
        saves = f"{kept} (saves {format_bytes(growth.step_bytes)} a step)"
        return [saves, *told] if growth.is_lasting else [*told, saves]
    return told


def _of_worst(measured: Measurement) -> Iterable[Remedy]:
    """Return remedies of the step; of a whole run whose worst part is no step, those of the run alone."""
    is_of_step = measured.worst is None or measured.worst.is_step
    return [each for each in measured.free_remedies if is_of_step or each.kind == "empty_cache"]


def _of_evaluations(events: Iterable[RunEvent]) -> Iterator[str]:
    """Yield what costs nothing and lets evaluations of a whole run need less."""
    for event in events:
        if event.part != "evaluation" or not event.line:
            continue
        if event.has_graph:
            yield f"the evaluation at {event.line} records gradients: put it under torch.no_grad()"
        if event.over_limit_bytes and event.batch_bytes:
            total = "" if event.batches is None else f" (saves {format_bytes(event.batches * event.batch_bytes)})"
            yield (
                f"each batch of the evaluation at {event.line} leaves {format_bytes(event.batch_bytes)} on the card: "
                f"move outputs to the CPU as they come (of transformers' Trainer: eval_accumulation_steps=1){total}"
            )
        elif event.over_limit_bytes and not event.has_graph:
            yield (
                f"no batch of the evaluation at {event.line} needs what another has left: make its batches smaller "
                "(of transformers' Trainer: per_device_eval_batch_size)"
            )


def suggestions(measured: Measurement, most: int | None = MOST) -> list[Suggestion]:
    """Return the schemes worth trying, that which may save most of the peak first, at most so many.

    There are none without the parts of the peak, where there is room, where nothing is trained, and where an evaluation
    or a save of a whole run needs more than its steps. A scheme that refuses the model is left out. Offloading is slow,
    and saves the same bytes as recomputation: it comes last.
    """
    parts = measured.peak_parts
    if parts is None or not measured.peak_bytes or has_room(measured) or measured.peak_phase == "generation":
        return []
    if measured.worst is not None and not measured.worst.is_step:  # schemes change steps alone
        return []
    made = [rule(measured, parts) for rule in _RULES]
    refused = measured.built.refused if measured.built else ()
    possible = [each for each in made if each is not None and each.scheme not in refused]
    found = [each for each in possible if each.bytes_at_best >= _WORTH * measured.peak_bytes]
    return sorted(found, key=lambda each: (each.scheme == "offload", -each.bytes_at_best))[:most]


def _percent(amount: int, measured: Measurement) -> str:
    return f"{100 * amount / measured.peak_bytes:.0f} % of the peak"


def _held(measured: Measurement, is_meant: Callable[[Holder], object]) -> int:
    holders: Iterable[Holder] = measured.timeline.holders if measured.timeline else ()
    return sum(holder.held_bytes for holder in holders if holder.kind != "host" and is_meant(holder))


def _recomputed(measured: Measurement, parts: PeakParts) -> Suggestion:
    saved = parts.activation_bytes
    why = f"{_percent(saved, measured)} are saved tensors: blocks keep their inputs and run again; gradients are exact"
    return Suggestion("checkpoint", why, round(0.8 * saved))


def _offloaded(measured: Measurement, parts: PeakParts) -> Suggestion:
    saved = parts.activation_bytes
    why = f"{_percent(saved, measured)} are saved tensors: they wait in host memory; gradients are exact"
    return Suggestion("offload", why, round(0.6 * saved))


def _packed(measured: Measurement, parts: PeakParts) -> Suggestion | None:
    """The input of an activation is as large as its output, and saved if the model trains what is before it."""
    results = _held(measured, lambda holder: holder.kind == "saved" and _ACTIVATION.search(holder.operator))
    if not results:
        return None
    why = f"activation functions keep inputs, {_percent(results, measured)}: this keeps 3 bits of each element"
    return Suggestion("fewbit:3", why, round(0.9 * results))


def _in_pieces(measured: Measurement, parts: PeakParts) -> Suggestion | None:
    """Of a script's model the layer that makes the logits has to be known."""
    logits = _held(measured, lambda holder: _LOGITS.search(holder.operator))
    head = measured.built.head if measured.built else None
    if not logits or head is None:
        return None
    scheme = f"chunked_loss:8,head={head}" if head else "chunked_loss:8"
    why = f"{_percent(logits, measured)} are made in the cross entropy: logits a piece of the tokens at a time"
    return Suggestion(scheme, why, round(0.85 * logits))


def _eight_bits(measured: Measurement, parts: PeakParts) -> Suggestion | None:
    if measured.optimizer not in _ADAMS:
        return None
    state = parts.optimizer_bytes
    why = f"{_percent(state, measured)} are state of {measured.optimizer}: moments of 8 bits; gradients are exact"
    return Suggestion("adam8bit", why, round(0.7 * state))


def _adapters(measured: Measurement, parts: PeakParts) -> Suggestion | None:
    """Adapters take the gradients and the state of all weights but their own; qlora stores the weights in 4 bits."""
    trained = parts.gradients_bytes + parts.optimizer_bytes
    if (measured.gradients_bytes or 0) < 0.5 * measured.weights_bytes:  # most of the model is frozen already
        return None
    limit = measured.memory_limit_bytes
    if limit is not None and measured.peak_bytes - trained > limit:
        why = f"{_percent(trained + parts.weights_bytes, measured)} are weights, their gradients and optimizer state"
        return Suggestion(
            "qlora:16", f"{why}: adapters over weights of 4 bits", round(0.95 * trained + 0.7 * parts.weights_bytes)
        )
    why = f"{_percent(trained, measured)} are gradients and optimizer state: adapters alone are trained"
    return Suggestion("lora:16", why, round(0.95 * trained))


_RULES: tuple[Callable[[Measurement, PeakParts], Suggestion | None], ...] = (
    _recomputed,
    _in_pieces,
    _packed,
    _eight_bits,
    _adapters,
    _offloaded,
)
