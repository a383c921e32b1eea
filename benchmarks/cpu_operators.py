"""What torch's operators take on a CPU, forward and backward, beside what simulations count for them.

The operators are those of torch's own tests (``op_db``) that have a backward pass in float32, each with up to five of
its samples, made larger where that is possible: other ranks, arguments, and layouts of the first tensor. Each runs
forward and backward, once for the mean of its result, whose gradient is one expanded number, and once for the mean
square. What counts is the most that is alive at once beyond the inputs, by the allocator's events and by a simulation::

    .venv/bin/python benchmarks/cpu_operators.py results/cpu-operators                     # some 5 minutes on one core
    .venv/bin/python benchmarks/cpu_operators.py results/cpu-operators --only 'topk|unfold' --again

Operators are kept as they end, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import multiprocessing
import re
import signal
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from actbench.measuring.meters.trace import AllocationTrace
from actbench.simulator import profiles
from actbench.simulator.operators import cpu_operators
from actbench.simulator.tracker import StorageTracker
from actbench.simulator.unmodelled import Unmodelled
from actbench.tools.script.values.values import ScriptMode

SAMPLES = 5
LEAST_BYTES, MOST_BYTES = 512 * 1024, 8 * 1024 * 1024
"""Of the inputs of a sample."""

MOST_RESULTS = 16
"""Tensors of a result of which the loss is made; ``unbind`` returns thousands."""

TOLERANCE = 0.02
SECONDS, TRIAL_SECONDS = 60, 5
"""What an operator may take, and what a sample may in a trial: some return thousands of tensors."""

NAME = "cpu-operators"

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean square": lambda x: x.square().mean(),
}

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""The first argument of an operator, and the others."""


@dataclass
class Run:
    """A sample of an operator, and the bytes of its passes beyond its inputs.

    Attributes:
        at_most: Whether the simulation calls its bytes an upper bound, since a shape depends on values.
        approximate: Whether the simulation marks its bytes as an estimate.
    """

    operands: str
    loss: str
    real_bytes: int
    simulated_bytes: int
    at_most: bool = False
    approximate: bool = False

    @property
    def off_by(self) -> float:
        """The share by which the simulation is off."""
        return self.simulated_bytes / self.real_bytes - 1 if self.real_bytes else float(self.simulated_bytes > 0)


@dataclass
class Row:
    """An operator, with its runs, and why others are missing."""

    operator: str
    runs: list[Run] = field(default_factory=list)
    missing: str = ""

    @property
    def worst(self) -> Run | None:
        """The run that is off by most."""
        return max(self.runs, key=lambda run: abs(run.off_by), default=None)


class LeftOutError(Exception):
    """Says why a sample is left out."""


def operators() -> list[Any]:
    """Return torch's descriptions of its operators with a backward pass, whose samples are larger than in its tests.

    Their module imports expecttest for classes of tests, which are not needed here.
    """
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations as described

    package = described.__name__.rpartition(".")[0]
    for module in [module for name, module in sys.modules.items() if name.startswith(package)]:
        for size, value in {"S": 24, "M": 28, "L": 32}.items():
            if isinstance(getattr(module, size, None), int):
                setattr(module, size, value)
    return [op for op in described.op_db if op.supports_autograd and torch.float32 in op.dtypes]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors among nested values."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def input_bytes(sample: Any) -> int:
    """Return the bytes of the elements of the dense tensors among nested values."""
    dense = [each for each in tensors(sample) if each.layout is torch.strided]
    return sum(each.numel() * each.element_size() for each in dense)


def copied_tensor(value: Tensor) -> Tensor:
    """Return a new leaf with the strides and values of a tensor."""
    if value.layout is not torch.strided:
        return value.detach().clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())


def copied(sample: Sample) -> Sample:
    """Return the sample with new leaves, which need gradients where the old ones do."""

    def copy(value: Any) -> Any:
        return copied_tensor(value).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return tree_map(copy, sample)  # type: ignore[no-any-return]


_WIDER: dict[str, Callable[[int], Sequence[int]]] = {
    "all": range,
    "first": lambda rank: (0,),
    "rows": lambda rank: (0,),
    "channels": lambda rank: range(min(2, rank)),
    "last": lambda rank: (rank - 1,),
}
"""Dimensions that are made larger, by their number; "rows" are those of the first tensor alone."""


def enlarged(sample: Sample, times: int, way: str) -> Sample:
    """Return a sample with larger dimensions, by a way of :data:`_WIDER`, but for those of size 1.

    Values are of the same kind. No number is zero, since the gradients of products with zeros are computed in
    another way.
    """

    def enlarge(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        by = times if way != "rows" or value is sample[0] else 1
        wider = _WIDER[way](value.dim())
        factors = [by if at in wider and (size > 1 or way == "rows") else 1 for at, size in enumerate(value.shape)]
        twin = value.detach().repeat(factors) if max(factors) > 1 else copied_tensor(value)
        if twin.is_floating_point() and twin.layout is torch.strided:
            twin *= 1 + 1e-3 * torch.rand_like(twin)
            twin[twin == 0] = 0.5
        return twin.requires_grad_(value.requires_grad)

    return tree_map(enlarge, sample)  # type: ignore[no-any-return]


def passes(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> None:
    """Run an operator forward and backward."""
    given, args, kwargs = sample
    made = [each for each in tensors(op(given, *args, **kwargs)) if each.requires_grad][:MOST_RESULTS]
    if not made:
        raise LeftOutError("its result needs no gradient")
    if any(each.layout is not torch.strided for each in made):
        raise LeftOutError("its result is sparse")
    losses = [loss(torch.view_as_real(each) if each.is_complex() else each) for each in made if each.numel()]
    if not losses:
        raise LeftOutError("its result is empty")
    del made
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    del losses
    total.backward()  # type: ignore[no-untyped-call]


def real(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> int:
    """Return the most bytes that the allocator held during the passes."""
    sample = copied(sample)
    with AllocationTrace() as trace:
        trace.mark("begin")
        passes(op, sample, loss)
        trace.mark("end")
    return trace.peak_bytes("begin", "end") - trace.live_bytes("begin")


def simulated(op: Any, sample: Sample, loss: Callable[[Tensor], Tensor]) -> tuple[int, bool, bool]:
    """Return the most bytes that a simulation counts, whether they are an upper bound, and whether an estimate."""
    profile = profiles.get("cpu")
    bounds: list[str] = []
    mode, unmodelled = ScriptMode(bounds.append, bounds.append), Unmodelled(profile)
    tracker = StorageTracker(temporaries=unmodelled.temporaries)
    with cpu_operators(), mode:
        given = tree_map(lambda each: mode.from_tensor(each) if isinstance(each, Tensor) else each, copied(sample))
        with tracker:
            tracker.add(tensors(given))
            before = tracker.live_bytes
            tracker.reset_peak()
            passes(op, given, loss)
    return tracker.peak_bytes - before, bool(bounds), bool(unmodelled.reasons())


def described(sample: Sample) -> str:
    """Return a sample as one line."""
    given, args, kwargs = sample
    named = [f"{name}={_operand(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(_operand, (given, *args)), *named])[:200]


def _operand(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_operand, value))}]"
    if not isinstance(value, Tensor):
        return str(value)
    is_plain = value.layout is not torch.strided or value.is_contiguous()
    layout = "" if is_plain else f" by {'x'.join(map(str, value.stride()))}"
    return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}{layout}]"


def grown(op: Any, sample: Sample) -> Sample | None:
    """Return a sample of :data:`LEAST_BYTES` or more, if one runs, by the first way to enlarge it that works."""
    if any(each.layout is not torch.strided for each in tensors(sample)):
        return None  # the simulation refuses sparse tensors
    size = input_bytes(sample)
    if not size or size > MOST_BYTES:
        return None
    ways = [(1, "all")]
    if size < LEAST_BYTES:
        ratio = LEAST_BYTES / size
        free = max(sum(length != 1 for length in each.shape) for each in tensors(sample))
        if not free:
            return None
        line = math.ceil(ratio)
        if "conv" in op.name:  # whose kernels stay small
            ways = [(_root(ratio, 2), "channels"), (line, "rows")]
        else:
            ways = [(line, "rows")] if isinstance(sample[0], Tensor) and len(tensors(sample)) > 1 else []
            ways += [(_root(ratio, free), "all"), (line, "first"), (line, "last"), (1, "all")]
    for times, way in ways:
        made = enlarged(sample, times, way)
        if input_bytes(made) <= MOST_BYTES and runs(op, made):
            return made
    return None


def _root(ratio: float, power: int) -> int:
    return next(times for times in itertools.count(2) if times**power >= ratio)


def runs(op: Any, sample: Sample) -> bool:
    """Return whether an operator takes a sample, in a few seconds, and its result is not too large."""
    try:
        with ended_after(TRIAL_SECONDS):
            if _is_large_result(op, sample):
                return False
            passes(op, copied(sample), LOSSES["mean"])
    except Exception:  # torch's samples fit each other, not every enlargement of them
        return False
    return True


def _is_large_result(op: Any, sample: Sample) -> bool:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map(lambda each: mode.from_tensor(each) if isinstance(each, Tensor) else each, copied(sample))
        try:
            return input_bytes(op(fake[0], *fake[1], **fake[2])) > 4 * MOST_BYTES
        except TimeoutError:
            raise
        except Exception:  # its shape depends on values, and is no larger than the inputs
            return False


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError inside the block when it takes longer."""

    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    if isinstance(given, Tensor) and given.layout is torch.strided and given.dim() > 1 and given.is_contiguous():
        if given.dim() == 4:
            twin = given.detach().contiguous(memory_format=torch.channels_last)
        else:
            twin = given.detach().transpose(0, -1).contiguous().transpose(0, -1)
        yield twin.requires_grad_(given.requires_grad), args, kwargs


def form(sample: Sample) -> Any:
    """Return what makes a sample unlike others: ranks, types, and names of arguments."""
    kinds = tuple((each.dim(), str(each.dtype), str(each.layout)) for each in tensors(sample))
    return kinds[:4], tuple(map(type, sample[1])), tuple(sample[2])


def is_large(sample: Sample) -> bool:
    """Return whether the inputs of a sample are large enough that buffers of a few KiB do not matter."""
    return input_bytes(sample) >= LEAST_BYTES


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
    few = large[: SAMPLES - 1]
    yield from few
    taken = set(map(described, few))
    others = (each for sample in large for each in (*layouts(sample), *ranks(sample)) if runs(op, each))
    for each in itertools.chain(itertools.islice(others, 12), large[SAMPLES - 1 :]):
        if len(taken) < SAMPLES and described(each) not in taken:
            taken.add(described(each))
            yield each


def compared(op: Any) -> Row:
    """Return an operator with its runs."""
    row, missing = Row(op.formatted_name), []
    for sample in samples(op):
        for name, loss in LOSSES.items():
            try:
                passes(op, copied(sample), loss)  # what libraries keep from their first call is no part of a step
                true = real(op, sample, loss)
                row.runs.append(Run(described(sample), name, true, *simulated(op, sample, loss)))
            except LeftOutError as left:
                missing.append(str(left))
            except Exception as error:  # the other samples are of interest, too
                missing.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    if not row.runs and not missing:
        missing.append("no sample runs")
    row.missing = "; ".join(dict.fromkeys(missing))
    return row


def _send(ops: Sequence[Any], pipe: Any) -> None:
    torch.set_num_threads(1)  # each thread of an operator has buffers of its own
    warnings.simplefilter("ignore")
    logging.disable()
    gc.freeze()
    for op in ops:
        pipe.send(compared(op))
        gc.collect()


def isolated(ops: Sequence[Any]) -> Iterator[Row]:
    """Compare operators in another process, and in a new one after each that crashes or hangs."""
    context = multiprocessing.get_context("fork")
    waiting = list(ops)
    while waiting:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(waiting, theirs))
        process.start()
        theirs.close()
        missing = ""
        while waiting and not missing:
            try:
                if ours.poll(SECONDS):
                    yield ours.recv()
                else:
                    missing = f"takes more than {SECONDS} s"
            except EOFError:
                missing = "its process ended without an answer"
            op = waiting.pop(0)
            if missing:
                yield Row(op.formatted_name, missing=missing)
        process.kill()
        process.join()


REASONS = {
    r"masked_(fill|select|scatter)|index_put": "as many elements are selected as a mask has",
    "matrix_exp": "as many products as the norm of the matrix asks for",
    "combinations": "a buffer of `nonzero_static`",
    "lu_solve|logdet|linalg_(slog)?det": "copies of matrices, here of one element each; not modelled",
    "nn_functional_conv.*": "a layout that oneDNN chooses for low images with wide padding; not modelled",
    "nn_functional_binary_cross_entropy": "the gradient of the target is multiplied in place",
    "_unsafe_masked_index.*": "copies of indices; not modelled",
    "nn_functional_(mse|smooth_l1)_loss": "a copy of operands in two layouts; not modelled",
    "nn_functional_embedding_bag": "buffers of sums with weights; not modelled",
    "linalg_householder_product": "a buffer that is not modelled",
    "chalf": "a copy of complex numbers of 16 bits; not modelled",
}
"""Why simulations of operators are off, by patterns of their names."""

SMALL_BYTES = 64 * 1024


def reason(row: Row) -> str:
    """Return why an operator is off, or why it was not compared."""
    run = row.worst
    if run is None:
        return row.missing
    if run.real_bytes < SMALL_BYTES:
        return "its samples are small: buffers of a few hundred bytes"
    if run.at_most:
        return "a shape depends on values: an upper bound"
    found = next((text for names, text in REASONS.items() if re.fullmatch(names, row.operator)), "")
    return f"{found}; marked as an estimate" if run.approximate else found


def is_off(row: Row) -> bool:
    """Return whether a run of an operator is off by more than the tolerance."""
    return row.worst is not None and abs(row.worst.off_by) > TOLERANCE


def page(rows: Sequence[Row]) -> str:
    """Return the table of all operators as Markdown."""
    compared_rows = [row for row in rows if row.runs]
    off = [row for row in compared_rows if is_off(row)]
    close = len(compared_rows) - len(off)
    count = sum(len(row.runs) for row in rows)
    lines = [
        "# Operators on a CPU, simulated and real",
        "",
        f"Made by `benchmarks/cpu_operators.py results/{NAME}` with torch {torch.__version__}.",
        "",
        (
            f"Of {len(rows)} operators of torch's own tests with a backward pass, {len(compared_rows)} were compared, "
            f"in {count:,} runs. {close} of them are within {TOLERANCE:.0%} in every run. Bytes are the most that is "
            "alive at once in both passes, beyond the inputs; each row has the run that is off by most."
        ),
        "",
        "| Operator | Runs | Real | Simulated | Off by | Reason | Run |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (not is_off(row), bool(row.runs), row.operator)):
        run = row.worst
        if run is None:
            lines.append(f"| `{row.operator}` | 0 |  |  |  | not compared: {reason(row)} |  |")
            continue
        why = reason(row) if is_off(row) else ""
        bytes_ = f"{run.real_bytes:,} | {run.simulated_bytes:,} | {run.off_by:+.1%}"
        operands = run.operands.replace("|", "\\|")
        lines.append(f"| `{row.operator}` | {len(row.runs)} | {bytes_} | {why} | {run.loss} of {operands} |")
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Row]:
    """Return the stored operators by name."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {name: Row(name, [Run(**run) for run in row["runs"]], row["missing"]) for name, row in stored.items()}


def write(path: Path, rows: dict[str, Row]) -> None:
    """Store operators, each on one line."""
    lines = []
    for name, row in rows.items():
        runs = [{key: value for key, value in asdict(run).items() if value is not False} for run in row.runs]
        lines.append(f"{json.dumps(name)}: {json.dumps({'runs': runs, 'missing': row.missing})}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Compare the operators, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where the table and its JSON are")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--again", action="store_true", help="compare operators again that are stored")
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)
    path = asked.output / f"{NAME}.json"
    found = read(path)
    chosen = [op for op in operators() if re.fullmatch(asked.only or ".*", op.formatted_name)]
    for row in isolated([op for op in chosen if asked.again or op.formatted_name not in found]):
        found[row.operator] = row
        run = row.worst
        text = f"{run.off_by:+.1%} ({run.real_bytes:,} bytes, {run.loss} of {run.operands})" if run else ""
        print(f"{row.operator}: {len(row.runs)} runs {text} {row.missing}", flush=True)
        write(path, found)
    (asked.output / f"{NAME}.md").write_text(page(list(found.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
