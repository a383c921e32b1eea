"""What each operator of a training step allocates on this GPU beyond its results, beside what simulations count for it.

A step runs twice under a dispatch mode, which asks torch's allocator around every operator: for the most bytes that it
held meanwhile, and for what stayed that no result holds, such as a workspace of cuBLAS. Printed are the operators whose
bytes differ from the formulas of ``simulator/temporaries.py``; with --output every operator is in OUTPUT, as JSON::

    python benchmarks/cuda_operators.py --output operators.json roberta-base:32 resnet50:32:actnn:L2
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actbench import scheme as schemes, workload as workloads
from actbench.measuring.meters import footprint
from actbench.measuring.meters.cudameter import CudaMeter, profile_of_device
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep
from actbench.simulator import temporaries
from actbench.simulator.caching import SMALLEST_BLOCK, round_up
from actbench.simulator.cublas import Workspaces


@dataclass
class Seen:
    """An operator on tensors of these shapes.

    Attributes:
        phase: Of the step, as :class:`TrainStep` names it.
        calls: How often it ran.
        extra_bytes: The most that it needed at once beyond what it left; ``counted_bytes`` is that of simulations.
        kept_bytes: What stayed allocated that no result holds, in the first call that left something.
    """

    operator: str
    operands: str
    phase: str
    calls: int = 0
    extra_bytes: int = 0
    counted_bytes: int = 0
    kept_bytes: int = 0

    @property
    def difference(self) -> int:
        """Bytes of a peak that simulations do not see in this operator."""
        return self.extra_bytes - self.counted_bytes


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks the allocator around every operator of a step; ``seen`` has them by operator, operands and phase."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        profile = profile_of_device()
        self.step, self.temporaries, self.workspaces = step, temporaries.cuda(profile), Workspaces(profile)
        self.seen: dict[tuple[str, str, str], Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it allocated."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        phase, operands = str(self.step.phase), ", ".join(map(_operand, tree_leaves(args)))
        seen = self.seen.setdefault((str(func), operands, phase), Seen(str(func), operands, phase))
        seen.calls += 1
        if peak - after > seen.extra_bytes or seen.calls == 1:
            blocks = (
                self.temporaries(func, args, result),
                self.workspaces.product_bytes(func, args, kwargs or {}, result),
            )
            counted = sum(round_up(block, SMALLEST_BLOCK) for block in blocks)
            seen.extra_bytes, seen.counted_bytes = peak - after, counted
        older = {storage.data_ptr() for storage in footprint.storages(_tensors((args, kwargs)))}
        new = [each for each in footprint.storages(_tensors(result)) if each.data_ptr() not in older]
        made = sum(round_up(each.nbytes(), SMALLEST_BLOCK) for each in new if each.device.type == "cuda")
        seen.kept_bytes = seen.kept_bytes or after - before - made
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _operand(value: Any) -> str:
    if isinstance(value, torch.UntypedStorage):
        return f"storage[{value.nbytes()}]"  # whose text has every byte
    if not isinstance(value, Tensor):
        return str(value)
    layout = "" if value.is_contiguous() else f" by {'x'.join(map(str, value.stride()))}"
    return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}{layout}]"


def operators_of(case: Case) -> list[Seen]:
    """Return the operators of two steps of a case, those first that differ most."""
    meter, workload = CudaMeter(), workloads.load_workload(case)
    setup = schemes.build(case.scheme).apply(meter.adopt(workload.setup(materialize=True, seed=case.seed)))
    step = TrainStep(setup, meter.place(workload.batch(case.batch_size, seed=case.seed)))
    mode = Operators(step)
    with mode:
        step()
        step()
    torch.cuda.synchronize()
    return sorted(mode.seen.values(), key=lambda seen: (-abs(seen.difference), -abs(seen.kept_bytes)))


def case_of(text: str) -> Case:
    """Read MODEL:BATCH or MODEL:BATCH:SCHEME."""
    model, _, rest = text.partition(":")
    batch, _, scheme = rest.partition(":")
    pictures = model in ("resnet50", "resnet152", "densenet201", "wide_resnet101_2", "swin_t", "vit_b_16")
    half = "llama" in model or "gpt2" in model
    return Case(
        model=model,
        batch_size=int(batch),
        scheme=scheme or "exact",
        optimizer="sgd-momentum" if pictures else "adamw",
        dtype="bfloat16" if half else "float32",
        attention="sdpa" if half else "eager",
        sequence_length=1024 if half else 128,
        meter="cuda",
        weights="random",
    )


def main() -> None:
    """Run the cases, and print the operators that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", metavar="MODEL:BATCH[:SCHEME]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every operator to it, as JSON")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for text in asked.case:
        try:
            rows = operators_of(case_of(text))
        except Exception as error:  # the others are of interest, too
            found[text] = f"{type(error).__name__}: {error}"
            print(f"\n{text}: {found[text]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        found[text] = [asdict(row) for row in rows]
        print(f"\n{text}: operator, phase, calls, bytes more than counted, of bytes, kept, operands", flush=True)
        for row in [row for row in rows if row.difference or row.kept_bytes][:25]:
            numbers = f"{row.calls} | {row.difference:,} | {row.extra_bytes:,} | {row.kept_bytes:,}"
            print(f"{row.operator} | {row.phase} | {numbers} | {row.operands[:150]}", flush=True)
        if asked.output is not None:
            asked.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
