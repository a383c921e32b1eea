"""Other tools that estimate the memory of a training step, and ours, compared with published peaks.

::

    .venv/bin/python benchmarks/other_estimators.py estimate    # results/other-estimators.json
    .venv/bin/python benchmarks/other_estimators.py page        # docs/other-estimators.md

``estimate`` needs accelerate and torch-kitsune beside actbench. Each tool runs on each row in a process of its own. Its
seconds are those of the processor, from the model's construction to the answer; imports do not count.
"""

from __future__ import annotations

import json
import resource
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from actbench.model.records import Case
from actbench.units import GIB

ROOT = Path(__file__).resolve().parents[1]
PEAKS = runpy.run_path(str(ROOT / "benchmarks" / "published_peaks.py"))
FORMULAS = runpy.run_path(str(ROOT / "benchmarks" / "memory_formulas.py"))
RESULTS = ROOT / "results" / "other-estimators.json"
PAGE = ROOT / "docs" / "other-estimators.md"
MODELS = "./benchmarks/published_models/"
LLAMA_2 = "llama-3.1-8b@vocab_size=32000,intermediate_size=11008,num_key_value_heads=32"
DINO = "dinov2-large@hidden_size=1536,num_hidden_layers=40,num_attention_heads=24,use_swiglu_ffn=true,num_labels=45"
_COMMANDS = (
    "mobilenet_v2 -b 64 --optimizer sgd --device-profile a100-40gb -s exact",
    f"{MODELS}others.py:transformer -b 256 --device-profile a100-40gb -s exact",
    f"{MODELS}masked_lm.py:bert_eager_512 -b 16 --device-profile a100-80gb -s exact",
    "vit_h_14 -b 8 --autocast bf16 --optimizer adamw-fused --device-profile cuda-16gib -s exact",
    f"{DINO} -b 32 --image-size 224 --dtype bf16 --optimizer adamw-fused --device-profile cuda-16gib -s checkpoint",
    (
        f"{LLAMA_2} -b 2 --sequence-length 512 --dtype bf16 --optimizer adamw-fused "
        "--device-profile a100-80gb -s checkpoint"
    ),
    "mistral-7b -b 2 --sequence-length 512 --dtype bf16 --device-profile a10g -s lora:32,target=q_proj/v_proj",
)
ROWS = tuple(f"{command} --torch-era 2.11" for command in _COMMANDS)  # as the rows of published-peaks.md
LIMIT_SECONDS = 900

_HEAD = """\
# Other estimators compared with ours

`benchmarks/other_estimators.py` makes this page. It compares tools that work without a GPU, on rows of
[published-peaks.md](published-peaks.md) whose figure is torch's allocated memory. Each cell has the tool's error
against the published peak, and its run time on one core ({machine}), which includes building the model and excludes
imports. A dash gives the reason why a tool was not run.
"""

_CLAIMS = """\
What each tool estimates, and how it was run:

- **actbench** {actbench} simulates the step on fake tensors, with the operators, workspaces and block sizes of the card
  that the row names.
- **accelerate** {accelerate} (`accelerate estimate-memory`) prints the maximum of weights, gradients and Adam's state,
  by its documentation for a batch of one. It counts no activations, and supports no other optimizer and no adapters.
  For rows in half precision the figure is that of `--dtypes float16`, which means float32 weights. The command loads a
  model from the hub; here its functions got the row's model, on the meta device.
- **MemTracker** of torch {torch} (`torch.distributed._tools.mem_tracker`) tracks the tensors of a real loop, here of
  two whole steps on fake tensors. It reports the memory by category and builds no model: models, losses and
  checkpointing are actbench's here. Without a GPU, tensors and operators are the CPU's, also fused attention. Memory
  that an operator allocates internally is not counted. It hooks the gradient of every parameter, so it refuses frozen
  parameters.
- **torch-kitsune** {kitsune} (`predict_memory`, `estimate_lora_memory`) sums weights, gradients, state and estimated
  activations of a model and its input, and adds a share for overhead. It supports no checkpointing, no autocast, no
  loss, and only one tensor as input.
- **PEFT** {peft} has no estimator in its package.
- **SimuMax** 1.2 was not run: it knows layers of Megatron alone. Its own table of 43 steps on B200
  (`docs/b200/b200_release_v1.2_summary.md` of MooreThreads/SimuMax) has errors of memory of 0.40 % in the median and
  1.38 % at worst; the notes beside it say that figures were made anew after changes of the model.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate with all tools, or one row with one; or write the page."""
    what, *more = sys.argv[1:] if arguments is None else arguments
    if what == "one":
        print(json.dumps(one(more[0], int(more[1]))))
    elif what == "estimate":
        RESULTS.write_text(json.dumps(estimate(), indent=1) + "\n")
    else:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))


def estimate() -> dict[str, Any]:
    """Run each tool on each row."""
    from actbench.machine import machine

    rows = [{"command": command, **{tool: _ran(tool, place) for tool in TOOLS}} for place, command in enumerate(ROWS)]
    names = {"actbench": "actbench", "torch": "torch", "accelerate": "accelerate", "kitsune": "torch-kitsune"}
    versions = {name: metadata.version(package) for name, package in {**names, "peft": "peft"}.items()}
    return {"machine": machine().processor, "versions": versions, "rows": rows}


def _ran(tool: str, place: int) -> dict[str, Any]:
    run = [sys.executable, __file__, "one", tool, str(place)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=ROOT)
    answer: dict[str, Any] = json.loads(done.stdout) if not done.returncode else {"failed": done.stderr[-500:]}
    print(tool, ROWS[place], answer, flush=True)
    return answer


def one(tool: str, place: int) -> dict[str, Any]:
    """Return what a tool says of a row: the bytes of the peak and its seconds, or why it cannot be asked."""
    case: Case = PEAKS["case_of"](ROWS[place])
    load, run = TOOLS[tool]
    lacks = load(case)
    if lacks:
        return {"cannot": lacks}
    before = resource.getrusage(resource.RUSAGE_SELF)
    found = run(case)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {"bytes": found, "seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def _built(case: Case) -> Any:
    from actbench.workload import load_workload

    workload = load_workload(case)
    return workload, workload.setup(materialize=False, seed=0)


def _imported(case: Case) -> str:
    import actbench.measuring.bench  # noqa: F401  (before the clock starts)

    return ""


def _ours(case: Case) -> int:
    from actbench.measuring.bench import measure

    return int(measure(case).peak_bytes)


def _accelerate_lacks(case: Case) -> str:
    import accelerate.commands.estimate  # noqa: F401

    import actbench.workload  # noqa: F401

    if "lora" in case.scheme:
        return "no adapters"
    return "" if case.optimizer in ("adamw", "adamw-fused") else "Adam alone"


def _accelerate(case: Case) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    model = _built(case.model_copy(update={"dtype": "float32"}))[1].module
    whole, _ = calculate_maximum_sizes(model)
    precision = "float16" if case.dtype != "float32" or case.autocast else "float32"
    return int(max(estimate_training_usage(whole, precision).values()))


def _tracker_lacks(case: Case) -> str:
    import torch.distributed._tools.mem_tracker  # noqa: F401

    return "no frozen parameters" if "lora" in case.scheme else _imported(case)


def _tracker(case: Case) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    from actbench import scheme as schemes
    from actbench.scheme.setup import TrainStep
    from actbench.simulator.fake import fake_mode, shapes_only, to_fake

    workload, setup = _built(case)
    mode = fake_mode()
    to_fake(setup.module, mode)
    setup = setup if case.scheme == "exact" else schemes.build(case.scheme).apply(setup)
    with mode, shapes_only():
        step = TrainStep(setup, workload.batch(case.batch_size, seed=0))
        tracker = MemTracker()
        tracker.track_external(setup.module, step.optimizer, *step.batch.values())
        with tracker:
            step()
            tracker.reset_mod_stats()  # of modules alone, whose second pass it else refuses
            step()
    [peak] = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


def _kitsune_lacks(case: Case) -> str:
    import kitsune.predict.lora_estimator  # noqa: F401

    import actbench.workload  # noqa: F401

    if "checkpoint" in case.scheme:
        return "no checkpointing"
    if case.autocast:
        return "no autocast"
    return "one input alone" if case.model.endswith(":transformer") else ""


def _kitsune(case: Case) -> int:
    import torch
    from kitsune.predict import predict_memory
    from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory

    workload, setup = _built(case)
    batch = workload.batch(1, seed=0)
    shape = tuple(next(iter(batch.values())).shape[1:])
    if "lora" in case.scheme:
        config = LoRAConfig(rank=32, target_modules=["q_proj", "v_proj"])
        found = estimate_lora_memory(setup.module, shape, case.batch_size, torch.bfloat16, config)
        return int(found.total_bytes)
    dtype = next(setup.module.parameters()).dtype
    return int(predict_memory(setup.module, shape, case.batch_size, dtype, optimizer="sgd", training=True).total_bytes)


TOOLS: Mapping[str, tuple[Callable[[Case], str], Callable[[Case], int]]] = {
    "actbench": (_imported, _ours),
    "accelerate": (_accelerate_lacks, _accelerate),
    "MemTracker": (_tracker_lacks, _tracker),
    "torch-kitsune": (_kitsune_lacks, _kitsune),
}


def page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [_HEAD.format(machine=results["machine"]), f"| Row | Published | {' | '.join(TOOLS)} |"]
    lines.append(f"| --- | ---: |{' ---: |' * len(TOOLS)}")
    for row in results["rows"]:
        figure = _figure(row["command"])
        cells = (_cell(row[tool], figure["published_gib"]) for tool in TOOLS)
        told = f"{figure['source']}: {figure['setting']}"
        lines.append(f"| {told} | {figure['published_gib']:.2f} GiB | {' | '.join(cells)} |")
    lines += [f"| **Median error, rows answered** | | {' | '.join(_median(results, tool) for tool in TOOLS)} |", ""]
    return "\n".join(lines) + "\n" + _CLAIMS.format(**results["versions"]) + FORMULAS["section"]()


def _figure(command: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        row for row in PEAKS["runnable"]() if row["command"] == command and row["kind"] == "allocated"
    )
    return found


def _error(answer: Mapping[str, Any], published_gib: float) -> float:
    return float(answer["bytes"] / (published_gib * GIB) - 1)


def _cell(answer: Mapping[str, Any], published_gib: float) -> str:
    if "bytes" in answer:
        return f"{_error(answer, published_gib):+.1%}, {answer['seconds']:.1f} s"
    return f"– ({answer['cannot']})" if "cannot" in answer else "– (fails)"


def _median(results: Mapping[str, Any], tool: str) -> str:
    errors = [
        abs(_error(row[tool], _figure(row["command"])["published_gib"]))
        for row in results["rows"]
        if "bytes" in row[tool]
    ]
    return f"{statistics.median(errors):.1%}, {len(errors)} rows" if errors else "–"


if __name__ == "__main__":
    main()
