"""How long one simulated case takes in its process: building the model, converting it, and the measured step.

Each case runs in a process that is forked after everything was imported, as in a sweep. Rounds are interleaved, and the
least seconds of processor time in user mode are printed, since other programs only add to them::

    .venv/bin/python benchmarks/simulated_cases.py
    .venv/bin/python benchmarks/simulated_cases.py --models llama-3.1-8b --schemes exact,gact:L2 --rounds 5
    .venv/bin/python benchmarks/simulated_cases.py --device-profile rtx-4090 --untimed   # what estimating times adds
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import resource
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from actbench.model.records import Case
from actbench.run.executor import BENCH, PRELOAD

T = TypeVar("T")

MODELS: dict[str, dict[str, Any]] = {
    "roberta-base": {
        "task": "sequence-classification",
        "batch_size": 128,
        "sequence_length": 100,
        "attention": "eager",
        "device_profile": "cuda-16gib",
    },
    "resnet50": {
        "batch_size": 128,
        "image_size": 224,
        "optimizer": "sgd-momentum",
        "device_profile": "cuda-16gib",
    },
    "llama-3.1-8b": {"batch_size": 1, "sequence_length": 2048, "dtype": "bfloat16", "device_profile": "rtx-4090"},
    "qwen3-0.6b": {"batch_size": 1, "sequence_length": 1024, "dtype": "bfloat16", "device_profile": "rtx-4090"},
    "mixtral-8x7b@num_hidden_layers=4": {
        "batch_size": 1,
        "sequence_length": 1024,
        "dtype": "bfloat16",
        "device_profile": "rtx-4090",
    },
}
SCHEMES = ("exact", "gact:L2", "actnn:L3", "checkpoint", "encode:bf16", "smaq", "lora:16")


class Run(NamedTuple):
    """One case in a process of its own.

    Attributes:
        user_seconds: Of the processor in user mode, after everything was imported.
        peak_bytes: What the case answers; None where it fails.
        failure: Why it fails.
    """

    user_seconds: float
    peak_bytes: int | None
    failure: str = ""


def main() -> None:
    """Run the cases that were asked for and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of these, with , between them")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="schemes; the first is 1.00 x")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case runs")
    parser.add_argument("--device-profile", help="simulate this device in place of each model's own")
    parser.add_argument("--untimed", action="store_true", help="run each case also without estimating its time")
    asked = parser.parse_args()
    prepare()
    for model in asked.models.split(","):
        planned = cases(model, asked.schemes.split(","), asked.device_profile)
        if asked.untimed:
            for scheme, (timed, untimed) in beside_untimed(planned, asked.rounds).items():
                times = timed.user_seconds / untimed.user_seconds
                found = timed.failure or f"{times:.3f} x without a time"
                print(f"{model:34} {scheme:12} {timed.user_seconds:6.2f} s, {found}", flush=True)
            continue
        least = measure(planned, asked.rounds)
        first = next(iter(least.values())).user_seconds
        for case, run in least.items():
            found = run.failure or f"{run.peak_bytes:>15,} bytes at the peak"
            times = run.user_seconds / first
            print(f"{model:34} {case:12} {run.user_seconds:6.2f} s {times:5.2f} x {found}", flush=True)


def prepare() -> None:
    """Import what the process imports from which a sweep forks the processes of its cases."""
    for module in (BENCH, *PRELOAD):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def cases(model: str, schemes: Iterable[str], device_profile: str | None = None) -> list[Case]:
    """Return a simulated case of each scheme."""
    settings = {**MODELS[model], **({"device_profile": device_profile} if device_profile else {})}
    return [Case(model=model, scheme=scheme, meter="simulated", **settings) for scheme in schemes]


def beside_untimed(planned: Iterable[Case], rounds: int) -> dict[str, tuple[Run, Run]]:
    """Return the fastest runs of each scheme, with its time estimated and without, which take turns."""
    ways = {
        (case.scheme, untimed): partial(forked, case, untimed=untimed) for case in planned for untimed in (False, True)
    }
    least = fastest(ways, rounds)
    return {scheme: (least[scheme, False], least[scheme, True]) for scheme, _ in least}


def measure(planned: Iterable[Case], rounds: int) -> dict[str, Run]:
    """Run cases in rounds, and return the fastest run of each by its scheme."""
    return fastest({case.scheme: partial(forked, case) for case in planned}, rounds)


def fastest(ways: Mapping[T, Callable[[], Run]], rounds: int) -> dict[T, Run]:
    """Run all in rounds, and return the fastest run of each."""
    least: dict[T, Run] = {}
    for _ in range(rounds):
        for name, run in ways.items():
            found = run()
            least[name] = min(found, least.get(name, found))
    return least


def forked(case: Case, *, untimed: bool = False) -> Run:
    """Run a case in a process that is forked from this one; ``untimed`` for one that notes no operator's time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(case, theirs, untimed))
    process.start()
    theirs.close()
    found: Run = ours.recv()
    process.join()
    return found


def _run(case: Case, answer: Connection, untimed: bool) -> None:
    from actbench.measuring.bench import Session
    from actbench.simulator import simulated

    if untimed:
        noted = simulated.Recorder
        vars(simulated)["Recorder"] = lambda phase, **_: noted(phase, all_operators=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    peak_bytes, failure = None, ""
    try:
        peak_bytes = Session(case).memory().peak_bytes
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    answer.send(Run(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before, peak_bytes, failure))


if __name__ == "__main__":
    main()
