"""What torch's operators take on a CPU, forward and backward, beside what simulations count for them.

The operators are those of torch's own tests (``op_db``) that have a backward pass in float32, each with up to five of
its samples, made larger where that is possible: other ranks, arguments, and layouts of the first tensor. Each runs
forward and backward, once for the mean of its result, whose gradient is one expanded number, and once for the mean
square. What counts is the most that is alive at once beyond the inputs, by the allocator's events and by a simulation::

    .venv/bin/python benchmarks/cpu_operators.py results/cpu-operators               # some minutes on one core
    .venv/bin/python benchmarks/cpu_operators.py results/cpu-operators --only 'topk|unfold' --again

Operators are kept as they end, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import multiprocessing
import re
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from actbench.measuring.meters.trace import AllocationTrace
from actbench.simulator import profiles
from actbench.simulator.operators import device_operators
from actbench.simulator.tracker import StorageTracker
from actbench.simulator.unmodelled import Unmodelled
from actbench.tools.script.values import ScriptMode

SAMPLES = 5
LEAST_BYTES, MOST_BYTES = 512 * 1024, 8 * 1024 * 1024
TOLERANCE = 0.02
MOST_RESULTS = 16
SECONDS = 60
"""What an operator may take."""

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean square": lambda x: x.square().mean(),
}


def operators() -> list[Any]:
    """Return torch's descriptions of its operators with a backward pass; expecttest, which its tests need, need not be."""
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations as described

    for name, module in list(sys.modules.items()):
        if name.startswith(described.__name__.rpartition(".")[0]):
            for size, value in {"S": 24, "M": 28, "L": 32}.items():
                if hasattr(module, size) and isinstance(getattr(module, size), int):
                    setattr(module, size, value)
    return [op for op in described.op_db if op.supports_autograd and torch.float32 in op.dtypes]


@dataclass
class Run:
    """A sample of an operator, and the bytes of its passes beyond its inputs."""

    operands: str
    loss: str
    real: int
    simulated: int
    at_most: bool = False

    @property
    def off_by(self) -> float:
        """The share by which the simulation is off."""
        return self.simulated / self.real - 1 if self.real else float(self.simulated > 0)


@dataclass
class Row:
    """An operator, with its runs, or why it has none."""

    operator: str
    runs: list[Run] = field(default_factory=list)
    reason: str = ""


Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]


def tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def input_bytes(sample: Sample) -> int:
    return sum(each.numel() * each.element_size() for each in tensors(sample) if each.layout is torch.strided)


def copied(sample: Sample) -> Sample:
    """Return the sample with new leaves, which have strides, values and need of a gradient of the old ones."""

    def copy(value: Any) -> Any:
        return copied_tensor(value).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return tree_map(copy, sample)


def enlarged(sample: Sample, times: int, dims: str) -> Sample:
    """Return a sample whose dimensions are ``times`` larger, but for those of size 1 and with "rows" for others than the first of the first tensor, with values of their kind.

    No number is zero, which the gradients of products compute in another way.
    """

    def enlarge(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        by = times if dims != "rows" or value is sample[0] else 1
        chosen = {"all": range(value.dim()), "first": (0,), "rows": (0,), "last": (value.dim() - 1,)}[dims]
        factors = [by if at in chosen and (size != 1 or dims == "rows") else 1 for at, size in enumerate(value.shape)]
        twin = value.detach().repeat(factors) if max(factors) > 1 else copied_tensor(value)
        if twin.is_floating_point():
            twin *= 1 + 1e-3 * torch.rand_like(twin)
            twin[twin == 0] = 0.5
        return twin.requires_grad_(value.requires_grad)

    return tree_map(enlarge, sample)


def copied_tensor(value: Tensor) -> Tensor:
    """Return a new leaf with the strides and values of a tensor."""
    if value.layout is not torch.strided:
        return value.detach().clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())


def passes(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> None:
    """Run an operator forward and backward."""
    given, args, kwargs = sample
    made = [each for each in tensors(op(given, *args, **kwargs)) if each.requires_grad][:MOST_RESULTS]
    if any(each.layout is not torch.strided for each in made):
        raise Left("its result is sparse")
    if not made:
        raise Left("its result needs no gradient")
    losses = [loss(torch.view_as_real(each) if each.is_complex() else each) for each in made if each.numel()]
    if not losses:
        raise Left("its result is empty")
    del made
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    del losses
    total.backward()


class Left(Exception):
    """Why an operator or a sample is left out."""


def real(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> int:
    """Return the most bytes that the allocator held during the passes."""
    sample = copied(sample)
    with AllocationTrace() as trace:
        trace.mark("begin")
        passes(op, sample, loss)
        trace.mark("end")
    return trace.peak_bytes("begin", "end") - trace.live_bytes("begin")


def simulated(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> tuple[int, bool]:
    """Return the most bytes that a simulation counts, and whether they are an upper bound."""
    profile = profiles.get("cpu")
    bounds: list[str] = []
    mode = ScriptMode(bounds.append)
    unmodelled = Unmodelled(profile)
    tracker = StorageTracker(rounding=1, temporaries=unmodelled.temporaries)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    with device_operators(profile), mode:
        given = tree_map(fake, copied(sample))
        with tracker:
            tracker.add(tensors(given))
            before = tracker.live_bytes
            tracker.reset_peak()
            passes(op, given, loss)
    return tracker.peak_bytes - before, bool(bounds)


def operand(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value) if not isinstance(value, list | tuple) else f"[{', '.join(map(operand, value))}]"
    layout = "" if value.is_contiguous() else f" by {'x'.join(map(str, value.stride()))}"
    return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}{layout}]"


def described(sample: Sample) -> str:
    given, args, kwargs = sample
    named = [f"{name}={operand(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(operand, (given, *args)), *named])[:300]


def grown(op: Any, sample: Sample) -> Sample | None:
    """Return a sample of some :data:`LEAST_BYTES` or more, of all ways to enlarge it the first that runs."""
    size = input_bytes(sample)
    if not size or size > MOST_BYTES:
        return None
    ways = [(1, "all")]
    if size < LEAST_BYTES:
        ratio = LEAST_BYTES / size
        free = max(sum(length != 1 for length in each.shape) for each in tensors(sample))
        if not free:
            return None
        of_all = next(by for by in itertools.count(2) if by**free >= ratio)
        line = math.ceil(ratio)
        ways = [(line, "rows")] if isinstance(sample[0], Tensor) and len(tensors(sample)) > 1 else []
        if "conv" not in op.name:  # no network has kernels that are so large
            ways += [(of_all, "all"), (line, "first"), (line, "last"), (1, "all")]
    for by, dims in ways:
        made = enlarged(sample, by, dims)
        if input_bytes(made) <= MOST_BYTES and runs(op, made):
            return made
    return None


def runs(op: Any, sample: Sample) -> bool:
    """Return whether an operator takes a sample, and its result is not too large."""
    given, args, kwargs = copied(sample)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map(
                lambda each: mode.from_tensor(each) if isinstance(each, Tensor) else each, (given, args, kwargs)
            )
            made = op(fake[0], *fake[1], **fake[2])
        if input_bytes(made) > 4 * MOST_BYTES:
            return False
    except Exception:
        pass
    try:
        passes(op, (given, args, kwargs), LOSSES["mean"])
    except Exception:
        return False
    return True


def ranks(sample: Sample) -> Iterator[Sample]:
    """Yield the sample with its only tensor in other ranks."""
    given, args, kwargs = sample
    if isinstance(given, Tensor) and not tensors((args, kwargs)) and given.dim():
        flat = given.detach().flatten()
        for shape in ((-1,), (-1, 32), (8, -1, 16), (4, 8, 16, -1)):
            if flat.numel() % math.prod(size for size in shape if size > 0) == 0:
                yield flat.view(shape).clone().requires_grad_(given.requires_grad), args, kwargs


def layouts(sample: Sample) -> Iterator[Sample]:
    """Yield the sample with its first tensor in another layout, if it has one."""
    given, args, kwargs = sample
    if isinstance(given, Tensor) and given.dim() > 1 and given.is_contiguous():
        last = given.detach().contiguous(memory_format=torch.channels_last) if given.dim() == 4 else None
        twin = given.detach().transpose(0, -1).contiguous().transpose(0, -1) if last is None else last
        yield twin.requires_grad_(given.requires_grad), args, kwargs


def form(sample: Sample) -> Any:
    """What makes a sample unlike others: ranks, types, and names of arguments."""
    given, args, kwargs = sample
    kinds = tuple((each.dim(), str(each.dtype), each.is_contiguous()) for each in tensors(sample))
    return kinds[:4], tuple(map(type, args)), tuple(kwargs)


def samples(op: Any) -> Iterator[Sample]:
    """Yield up to :data:`SAMPLES` samples, those first that are least like each other; the last has another layout."""
    torch.manual_seed(0)
    forms: dict[Any, list[Sample]] = {}
    begun = time.monotonic()
    for count, each in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
        sample = (each.input, tuple(each.args), dict(each.kwargs))
        forms.setdefault(form(sample), []).append(sample)
        if count > 200 or time.monotonic() - begun > 10:
            break
    turns = itertools.zip_longest(*(sorted(found, key=input_bytes, reverse=True) for found in forms.values()))
    large: list[Sample] = []
    for tried, sample in enumerate(each for turn in turns for each in turn if each is not None):
        made = grown(op, sample)
        if made is not None:
            large.append(made)
        if sum(map(is_large, large)) >= SAMPLES or tried > 40 or time.monotonic() - begun > 20:
            break
    large = list(filter(is_large, large)) or large
    others = (each for sample in large for each in (*layouts(sample), *ranks(sample)) if runs(op, each))
    few = large[: SAMPLES - 1]
    yield from few
    taken = set(map(described, few))
    for each in itertools.chain(itertools.islice(others, 12), large[SAMPLES - 1 :]):
        if len(taken) < SAMPLES and described(each) not in taken:
            taken.add(described(each))
            yield each


def is_large(sample: Sample) -> bool:
    return input_bytes(sample) >= LEAST_BYTES


def compared(op: Any) -> Row:
    """Return an operator with its runs."""
    row = Row(op.formatted_name)
    reasons = []
    for sample in samples(op):
        for name, loss in LOSSES.items():
            try:
                real(op, sample, loss)
                true = real(op, sample, loss)
                counted, at_most = simulated(op, sample, loss)
                row.runs.append(Run(described(sample), name, true, counted, at_most))
            except Left as left:
                reasons.append(str(left))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}")
    if reasons:
        row.reason = "; ".join(dict.fromkeys(reasons))
    elif not row.runs:
        row.reason = "no sample of it runs"
    return row


def _run(op: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    pipe.send(asdict(compared(op)))


def isolated(op: Any) -> dict[str, Any]:
    """Compare an operator in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(op, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return asdict(Row(op.formatted_name, reason=f"takes more than {SECONDS} s"))
        return ours.recv()
    except EOFError:
        return asdict(Row(op.formatted_name, reason="its process ended"))
    finally:
        process.kill()
        process.join()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args(arguments)
    path = asked.output / "cpu-operators.json"
    asked.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for op in operators():
        name = op.formatted_name
        if not re.search(asked.only, name) or (name in found and not asked.again):
            continue
        begun = time.monotonic()
        found[name] = row = isolated(op)
        runs = [Run(**each) for each in row["runs"]]
        worst = max(runs, key=lambda run: abs(run.off_by), default=None)
        text = (
            ""
            if worst is None
            else f"{worst.off_by:+.1%} {worst.real:,} {worst.simulated:,} {worst.loss} {worst.operands[:100]}"
        )
        print(f"{name}: {len(runs)} runs, {text} {row['reason'][:200]} ({time.monotonic() - begun:.1f} s)", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
