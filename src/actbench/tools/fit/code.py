"""The code for a plan: the user's own loop, the Hugging Face Trainer, and the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.model.modelspecs import OPTIMIZER, dtype_for, is_function, optimizer_for
from actbench.model.records import Built, Case, Task
from actbench.scheme.base import Scheme
from actbench.scheme.composed import parts_in
from actbench.scheme.facets import LowPrecision
from actbench.simulator import profiles
from actbench.tools.fit.paste import literal
from actbench.tools.fit.pasted import Pasted, pasted
from actbench.tools.fit.rounding import RATE, Remedy, remedy
from actbench.units import counted
from actbench.workload.optimizers import SGD_RATE, TRAINERS, code_of

Returns = Literal["loss", "scores", "own"]

OPTIMIZER_CLASS = "AdamW"
"""The class of the optimizer that stands for one that a model does not bring."""


class Code(NamedTuple):
    """Code to paste.

    Attributes:
        loop: Python that trains ``model`` on ``batches``; its first lines say what it assumes.
        trainer: Python that trains ``model`` on ``data`` with the Hugging Face Trainer, or None.
        why_no_trainer: Why there is no ``trainer``; empty if there is one.
        command: The command that measures the plan.
    """

    loop: str
    trainer: str | None
    why_no_trainer: str
    command: str


def code_for(case: Case, measured: Measurement) -> Code:
    """Return the code of a case with a plan's scheme and optimizer; ``measured`` is its simulation."""
    parts, built = _parts(case), measured.built
    own = measured.optimizer if case.optimizer is None and measured.optimizer != OPTIMIZER_CLASS else None
    kept = remedy(case, parts, measured, _command)
    trainer, why_not = _trainer(case, parts, built, own, kept)
    return Code(_loop(case, parts, built, own, kept), trainer, why_not, _command(case))


def _parts(case: Case) -> Sequence[Scheme]:
    return () if case.scheme == "exact" else parts_in(schemes.build(case.scheme))


def _precisions(parts: Iterable[Scheme]) -> list[LowPrecision]:
    return [each for part in parts if (each := part.facet(LowPrecision)) is not None]


def _loop(case: Case, parts: Sequence[Scheme], built: Built | None, own: str | None, kept: Remedy) -> str:
    scaled = case.autocast == "float16" or any(each.scales_loss for each in _precisions(parts))
    own_loss = f"loss, the function that {case.model} returns, " if is_function(case.model) else ""
    made = _optimizer(case, _trained(parts))
    batches = f"batches, each a dictionary of tensors there with {counted(case.batch_size, 'row')}"
    lines = [
        f"# Yours: model, on its device, {own_loss}{_yours(own)}and {batches}.",
        "import torch",
        "import actbench",
        *_more_imports(made),
        *([f"{INSTEAD}import torchao.optim"] if kept.optimizer else []),
        *(
            []
            if own_loss
            else ["", "def loss(model, batch):  # yours", f"    return {_LOSSES[_returns(built)]}", "", ""]
        ),
        *kept.comments,
        *_prepared(case, built),
    ]
    lines += ["setup = actbench.TrainingSetup(", "    model,", "    loss=loss,"]
    lines += [f"    make_optimizer={'make_optimizer' if own else f'lambda model: {made}'},"]
    if kept.optimizer:
        lines.append(f"    {INSTEAD}make_optimizer=lambda model: {kept.optimizer.format(_trained(parts))},")
    types = [f"autocast=torch.{case.autocast}"] if case.autocast else []
    types += [f"inputs=torch.{case.dtype}"] if case.dtype not in (None, "float32") else []
    lines += [f"    precision=actbench.Precision({', '.join(types)}),"] if types else []
    lines += [")"]
    lines += [f"setup = actbench.apply(setup, {literal(case.scheme)})"] if parts else []
    lines += [f'{INSTEAD}setup = actbench.apply(setup, "{kept.scheme}")'] if kept.scheme else []
    lines += _scaled(_device(case)) if scaled else _PLAIN
    return _joined(lines)


def _yours(own: str | None) -> str:
    return f"make_optimizer, from the model to its {own}, " if own else ""


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines).replace(", \n", ",\n") + "\n"


INSTEAD = "# instead: "
"""Begins a line that may stand in place of the one above."""


_PLAIN = [
    "step = actbench.TrainStep(setup)",
    "for step.batch in batches:",
    "    print(float(step()))",
]


def _scaled(device: str) -> list[str]:
    return [
        f'optimizer, scaler = setup.make_optimizer(setup.module), torch.amp.GradScaler("{device}")',
        "for batch in batches:",
        "    for part in setup.cut(batch):",
        "        scaler.scale(setup.forward(part.batch) * part.share).backward()",
        "    scaler.step(optimizer)",
        "    scaler.update()",
        "    optimizer.zero_grad()",
    ]


def _device(case: Case) -> str:
    return "cuda" if profiles.get(case.device_profile or profiles.DEFAULT).is_cuda else "cpu"


_LOSSES: dict[Returns, str] = {
    "loss": "model(**batch).loss",
    "scores": 'torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])',
    "own": "model(**batch)",
}


def _returns(built: Built | None) -> Returns:
    """Return what a model returns: its loss (transformers), scores (torchvision), or what only the user knows."""
    if built is None or built.task is None:
        return "own"
    is_own = built.task == "image-classification" and not built.model_class.endswith("ForImageClassification")
    return "scores" if is_own else "loss"


_WRITING: frozenset[Task] = frozenset(("causal-lm", "seq2seq-lm", "speech-seq2seq", "image-text-to-text"))


def _prepared(case: Case, built: Built | None) -> list[str]:
    """Return the lines that prepare the model for the scheme."""
    writes = built is not None and built.task in _WRITING
    lines = ["model.config.use_cache = False  # what generation would keep"] if writes else []
    return lines + ([f"model = model.to(torch.{case.dtype})"] if case.dtype not in (None, "float32") else [])


def _trained(parts: Iterable[Scheme]) -> str:
    if any("parameters" in part.changes for part in parts):
        return "[each for each in model.parameters() if each.requires_grad]"
    return "model.parameters()"


def _optimizer(case: Case, trained: str) -> str:
    return code_of(case.optimizer or OPTIMIZER, trained, _rate(case))


_ADAPTERS_RATE = "2e-4"
"""Of adapters: LoRA's for GPT-2 and GPT-3 (arXiv 2106.09685, tables 11 and 12), QLoRA's for 7B and 13B (2305.14314)."""

_SGD_RATE = f"{SGD_RATE:g}"


def _rate(case: Case) -> str:
    """Return the learning rate in code, which users replace by their own."""
    if (case.optimizer or OPTIMIZER).startswith("sgd"):
        return _SGD_RATE
    return _ADAPTERS_RATE if any("parameters" in part.changes for part in _parts(case)) else RATE


def _trainer(
    case: Case, parts: Sequence[Scheme], built: Built | None, own: str | None, kept: Remedy
) -> tuple[str | None, str]:
    """Return the lines for Trainer, or the reason why there are none."""
    found = [pasted(part, case.batch_size) for part in parts]
    why_not = [each.why_not for each in found if each.why_not]
    if _returns(built) == "scores":
        why_not.append("Trainer takes models that return their own loss")
    if why_not:
        return None, "; ".join(why_not)
    callback = "+".join(each.callback for each in found if each.callback)
    before = [each.before for each in found if each.before]
    if any(each.convert for each in found):  # the callback converts too, and a model is converted only once
        spec = "+".join(each.convert or each.callback for each in found if each.convert or each.callback)
        before, callback = [*before, f"model = actbench.convert(model, {literal(spec)})"], ""
    optimizer = _given_optimizer(case, found, own)
    other = kept.optimizer.format("trained")
    if kept.scheme:
        by_chance = case.model_copy(update={"scheme": kept.scheme})
        other = _given_optimizer(by_chance, [pasted(each, case.batch_size) for each in _parts(by_chance)], own)
    arguments = {"per_device_train_batch_size": str(case.batch_size), "learning_rate": _rate(case)}
    if not optimizer:
        arguments["optim"] = f'"{TRAINERS[case.optimizer or OPTIMIZER]}"'
    if case.autocast is not None:
        arguments["bf16" if case.autocast == "bfloat16" else "fp16"] = "True"
    for each in found:
        arguments |= each.arguments
    half = next((each.dtype for each in _precisions(parts) if each.of_weights), case.dtype)
    collator = _collator(half) if half and half != "float32" and _reads_floats(built) else []
    prepared = [*kept.comments, *_prepared(case, built), *before, *collator]
    lines = [f"# Yours: model, {_yours(own)}and data, a data set of dictionaries."]
    if is_function(case.model):
        lines.append(
            f"# Trainer calls no loss of {case.model}: the model returns its loss, or you override compute_loss."
        )
    lines += _trainer_lines(prepared, callback, optimizer, other, arguments)
    return _joined(lines), ""


def _reads_floats(built: Built | None) -> bool:
    return built is not None and (built.image_size is not None or built.audio_shape is not None)


def _collator(dtype: str) -> list[str]:
    """Return the code of a collator that casts batches to the model's dtype: Trainer leaves them in float32."""
    cast = f"value.to(torch.{dtype}) if value.is_floating_point() else value"
    return [
        "def in_type(rows):",
        f"    return {{name: {cast} for name, value in default_data_collator(rows).items()}}",
    ]


def _given_optimizer(case: Case, found: Sequence[Pasted], own: str | None) -> str:
    """Return the code of the optimizer for Trainer; empty for Trainer's own."""
    wraps = [each.optimizer for each in found if each.optimizer]
    if not wraps and not own and (case.optimizer or OPTIMIZER) in TRAINERS:
        return ""
    code = "make_optimizer(model)" if own else _optimizer(case, "trained")
    kind = "Adam" if case.optimizer == "adam" else "AdamW"
    for wrap in wraps:
        code = wrap.replace("{rate}", _rate(case)).replace("{kind}", kind).replace("{}", code)
    return code


def _trainer_lines(
    before: Sequence[str], callback: str, optimizer: str, other: str, arguments: Mapping[str, str]
) -> list[str]:
    casts = any("default_data_collator" in text for text in before)
    needs_torch = "torch." in "".join([optimizer, *before])
    lines = ["import torch"] if needs_torch else []
    lines += [f"import {library}.optim" for library in ("torchao", "bitsandbytes") if f"{library}." in optimizer]
    lines += [f"{INSTEAD}import torchao.optim"] if "torchao." in other and "torchao." not in optimizer else []
    lines += ["import actbench"] if any("actbench." in text for text in before) else []
    lines += _more_imports(optimizer)
    lines += [f"from transformers import Trainer, TrainingArguments{', default_data_collator' if casts else ''}"]
    lines += ["from actbench.tools.trainers.huggingface import ActbenchCallback"] if callback else []
    lines += ["", *before]
    trained = "trained = [each for each in model.parameters() if each.requires_grad]"
    lines += [trained] if "trained" in optimizer + other else []
    lines += ["arguments = TrainingArguments(", '    "out",']
    lines += [f"    {name}={value}," for name, value in arguments.items()] + [")"]
    lines += ["trainer = Trainer(", "    model=model,", "    args=arguments,", "    train_dataset=data,"]
    lines += ["    data_collator=in_type,"] if casts else []
    lines += [f"    callbacks=[ActbenchCallback({literal(callback, '    ')})],"] if callback else []
    lines += [f"    optimizers=({optimizer}, None),"] if optimizer else []
    lines += [f"    {INSTEAD}optimizers=({other}, None),"] if other else []
    return [*lines, ")", "trainer.train()"]


def _more_imports(code: str) -> list[str]:
    modules = ("actbench.optim", "actbench.workload.optimizers")
    return [f"import {module}" for module in modules if f"{module}." in code]


def _command(case: Case) -> str:
    words = ["actbench measure", shlex.quote(case.model), f"-s {shlex.quote(case.scheme)}", f"-b {case.batch_size}"]
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
    limit = profile.step_bytes(case.memory_limit_bytes)
    for flag, value, usual in (
        ("task", case.task, "auto"),
        ("sequence-length", case.sequence_length, None),
        ("target-length", case.target_length, None),
        ("packed", case.packed, None),
        ("image-size", case.image_size, None),
        ("attention", case.attention, "sdpa"),
        ("dtype", case.dtype, dtype_for(case.model)),
        ("autocast", case.autocast, None),
        ("optimizer", case.optimizer, optimizer_for(case.model)),
        ("weights", case.weights, "random"),
        ("seed", case.seed, 0),
        ("memory-limit", f"{limit}B", f"{profile.step_bytes()}B"),
        ("meter", _device(case), None),
    ):
        words += [f"--{flag} {value}"] if value not in (None, usual) else []
    return " ".join([*words, *(["--trust-remote-code"] if case.trust_remote_code else [])])
