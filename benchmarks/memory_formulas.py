"""Formulas by which other tools estimate memory, compared with published peaks of language models.

::

    .venv/bin/python benchmarks/memory_formulas.py    # results/memory-formulas.json: the shapes of the models

``other_estimators.py page`` puts the formulas' errors into docs/other-estimators.md. A formula needs the shape of a
model and the setting of its training alone. Each is written here from its description: that of Unsloth from its
``VRAM_ESTIMATION.md``, that of ZeRO-3 from DeepSpeed's documentation of ``estimate_zero3_model_states_mem_needs``; the
third asks accelerate's own function.
"""

from __future__ import annotations

import json
import runpy
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from actbench.model.records import Case
from actbench.units import GIB

ROOT = Path(__file__).resolve().parents[1]
PEAKS = runpy.run_path(str(ROOT / "benchmarks" / "published_peaks.py"))
RESULTS = ROOT / "results" / "memory-formulas.json"

CONTEXT_BYTES = 1.4e9
"""What Unsloth's formula adds for CUDA's context and torch, which no figure of torch's allocator has."""

NF4_FACTOR = 3.2
"""By how much four-bit weights are smaller than 16-bit ones in Unsloth's formula."""

STATE_BYTES = {"adamw": 6, "adamw-fused": 6, "adam8bit": 4}
"""Bytes of optimizer state a parameter in Unsloth's formula, calibrated by its authors."""

_TARGETS = {
    "q_proj": "HH",
    "k_proj": "HK",
    "v_proj": "HK",
    "o_proj": "HH",
    "gate_proj": "HM",
    "up_proj": "HM",
    "down_proj": "MH",
}
"""Widths of the input and the output of each adapted layer."""

_ONE_CARD = {"exact", "checkpoint", "lora", "qlora", "adam8bit", "liger", "chunked_loss", "accumulate"}
_SHARDED = {"fsdp", "fsdp1", "zero3", "checkpoint", "liger", "chunked_loss"}


class Shape(NamedTuple):
    """The shape of a decoder, by the symbols of Unsloth's description.

    Attributes:
        H, L, V, K, M: Hidden size, layers, vocabulary, width of keys, width of the feed-forward layers.
        E: Experts; 1 without any.
        tied: Whether the head's weights are those of the embedding.
        length: Tokens of a row.
        parameters: All parameters, of which the module with the most own ones has ``largest``.
        adam_bytes: What accelerate estimates for Adam.
        dtype: The type of the embedding's weights.
    """

    H: int
    L: int
    V: int
    K: int
    M: int
    E: int
    tied: bool
    length: int
    parameters: int
    largest: int
    adam_bytes: int
    dtype: str


class Setting(NamedTuple):
    """What a case trains, as its scheme says it.

    Attributes:
        schemes: Names of the schemes, with what follows the name.
        rows: Rows of a micro-batch.
        processes: How many processes shard the model.
    """

    schemes: dict[str, str]
    rows: int
    processes: int

    @classmethod
    def of(cls, case: Case) -> Setting:
        """Return the setting of a case."""
        parts = (part.partition(":") for part in case.scheme.split("+"))
        schemes = {name: rest for name, _, rest in parts}
        shards = [rest.partition(",")[0] for name, rest in schemes.items() if name in ("fsdp", "fsdp1", "zero3")]
        micro = int(schemes.get("accumulate", "1").partition(",")[0])
        return cls(schemes, -(-case.batch_size // micro), int(shards[0]) if shards else 1)


def unsloth(shape: Shape, setting: Setting, case: Case) -> float | None:
    """Return the bytes of Unsloth's formula without the context; None for what it does not express."""
    names = setting.schemes.keys()
    optimizer = "adam8bit" if "adam8bit" in names else case.optimizer or "adamw"
    if names - _ONE_CARD or optimizer not in STATE_BYTES or shape.dtype == "float32":
        return None
    h, k, m, e = shape.H, shape.K, shape.M, shape.E
    quantizable = (2 * h * (h + k) + 3 * h * m * e + (e * h if e > 1 else 0)) * shape.L
    others = 2 * h * shape.L + shape.V * h * (1 if shape.tied else 2)
    weights = (quantizable / NF4_FACTOR if "qlora" in names else quantizable) * 2 + others * 2
    trained: float = quantizable + others
    adapter = setting.schemes.get("lora") or setting.schemes.get("qlora")
    if adapter is not None:
        adapted = _adapted(adapter, shape)
        if adapted is None:
            return None
        trained = adapted
    layers = shape.L if "checkpoint" not in names else 1.0 if adapter is not None else 2.0
    tokens = shape.length * setting.rows
    activations = tokens * (h + 2 * k + 2 + 2 * m) * 2 * 1.25 * layers
    state = trained * STATE_BYTES[optimizer]
    floor = weights * 0.15 if adapter is None else min(weights * 0.15, max(activations, state))
    return weights + (0 if adapter is None else trained * 2) + state + max(trained * 2, floor) + activations


def _adapted(adapter: str, shape: Shape) -> int | None:
    """Return the parameters of LoRA's matrices; None for layers that the formula does not know, or other adapters."""
    rank, *options = adapter.split(",")
    given = dict(each.partition("=")[::2] for each in options)
    targets = given["target"].split("/") if "target" in given else list(_TARGETS)
    if "adapter" in given or set(targets) - _TARGETS.keys():
        return None
    ends = [(getattr(shape, _TARGETS[each][0]), getattr(shape, _TARGETS[each][1])) for each in targets]
    return sum((one + other) * int(rank) for one, other in ends) * shape.L


def deepspeed(shape: Shape, setting: Setting, case: Case) -> float | None:
    """Return the bytes of DeepSpeed's formula for ZeRO-3; None without shards, and for frozen weights."""
    if setting.schemes.keys() - _SHARDED or setting.processes == 1:
        return None
    return 4 * shape.largest + 18 * shape.parameters / setting.processes


def accelerate(shape: Shape, setting: Setting, case: Case) -> float | None:
    """Return the bytes that ``accelerate estimate-memory`` prints for Adam; None for what it does not express."""
    is_full = not setting.schemes.keys() - {"exact", "checkpoint", "liger", "chunked_loss", "accumulate"}
    return shape.adam_bytes if is_full and (case.optimizer or "adamw") in ("adam", "adamw", "adamw-fused") else None


FORMULAS = {"Unsloth": unsloth, "DeepSpeed, ZeRO-3": deepspeed, "accelerate": accelerate}


def main() -> None:
    """Read the shapes of all models that a formula can be asked about."""
    rows = {_key(case): case for case in (PEAKS["case_of"](row["command"]) for row in PEAKS["runnable"]())}
    shapes = {}
    for key, case in rows.items():
        setting = Setting.of(case)
        if not (setting.schemes.keys() - _ONE_CARD and setting.schemes.keys() - _SHARDED):
            if (shape := _read(case)) is not None:
                shapes[key] = shape._asdict()
            print(key, shape, flush=True)
    RESULTS.write_text(json.dumps(shapes, indent=1) + "\n")


def _key(case: Case) -> str:
    return f"{case.model} {case.sequence_length or ''} {case.dtype or ''}".strip()


def _read(case: Case) -> Shape | None:
    """Build the model of a case without values, and return its shape; None if Adam trains no decoder."""
    from accelerate.commands.estimate import estimate_training_usage

    from actbench.workload import load_workload

    workload = load_workload(case)
    setup = workload.setup(materialize=False, seed=0)
    module = setup.module
    is_adam = setup.make_optimizer is not None and "Adam" in type(setup.make_optimizer(module)).__name__
    if not is_adam or not type(module).__name__.endswith("ForCausalLM"):
        return None
    config, ids = module.config, workload.batch(1, seed=0)["input_ids"]
    width, heads = config.hidden_size, config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    own = [sum(each.numel() for each in part.parameters(recurse=False)) for part in module.modules()]
    parameters = sum(each.numel() for each in module.parameters())
    dtype = str(module.get_input_embeddings().weight.dtype).removeprefix("torch.")
    precision = "float32" if dtype == "float32" else "float16"
    return Shape(
        H=width,
        L=config.num_hidden_layers,
        V=config.vocab_size,
        K=(getattr(config, "head_dim", None) or width // heads) * groups,
        M=getattr(config, "intermediate_size", None) or 4 * width,
        E=getattr(config, "num_local_experts", None) or 1,
        tied=bool(config.tie_word_embeddings),
        length=ids.shape[-1],
        parameters=parameters,
        largest=max(own),
        adam_bytes=int(max(estimate_training_usage(4 * parameters, precision).values())),
        dtype=dtype,
    )


def answers(shapes: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], float, dict[str, float]]]:
    """Yield each row with a record, the error of actbench, and the errors of the formulas that express it."""
    found = PEAKS["records"]()
    for row in PEAKS["runnable"]():
        case = PEAKS["case_of"](row["command"])
        if case not in found or _key(case) not in shapes or row["kind"] not in ("allocated", "reserved"):
            continue
        shape, setting, peak = Shape(**shapes[_key(case)]), Setting.of(case), row["published_gib"] * GIB
        told = {name: formula(shape, setting, case) for name, formula in FORMULAS.items()}
        errors = {name: amount / peak - 1 for name, amount in told.items() if amount is not None}
        if errors:
            yield row, PEAKS["error"](row, found[case].outcome), errors


_HEAD = """
## Formulas

Tools that estimate by a formula know a model by its shape alone. `benchmarks/memory_formulas.py` has three, written
from their descriptions, and asks each about all rows of [published-peaks.md](published-peaks.md) that it can express:
Unsloth's (without its 1.4 GB for the CUDA context) about decoders in 16 bits on one card, DeepSpeed's for ZeRO-3 about
full fine-tuning that is sharded, accelerate's about full fine-tuning with Adam. Beside each stands actbench, on the
same rows. Unsloth's formula is about training by Unsloth, whose loss and checkpointing take less than those of most
rows; DeepSpeed's counts float32 master weights, which rows in pure 16 bits do not have.

| Formula | Rows | Median error | Worst error | Within 10 % | actbench: median | worst | within 10 % |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def section() -> str:
    """Return the section of the page: each formula beside actbench on the same rows."""
    rows = list(answers(json.loads(RESULTS.read_text())))
    lines = []
    for name in FORMULAS:
        both = [(errors[name], ours) for _, ours, errors in rows if name in errors]
        cells = (cell for errors in zip(*both, strict=True) for cell in _summary(errors))
        lines.append(f"| {name} | {len(both)} | {' | '.join(cells)} |")
    return _HEAD + "\n".join(lines) + "\n"


def _summary(errors: tuple[float, ...]) -> tuple[str, str, str]:
    near = sum(abs(each) <= 0.1 for each in errors) / len(errors)
    return f"{statistics.median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}", f"{near:.0%}"


if __name__ == "__main__":
    main()
