"""The code of a plan: the user's own loop, the Hugging Face Trainer, the lines for a script, and the commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.model.modelspecs import OPTIMIZER, dtype_for, is_function, optimizer_for
from actbench.model.records import Built, Case, Task
from actbench.model.scripts import Script
from actbench.report.advice import needed_bytes
from actbench.scheme.base import OF_PARTS, OPTIMIZER_STATE, Change, Scheme
from actbench.scheme.composed import parts_in
from actbench.scheme.facets import LowPrecision, OwnOptimizer
from actbench.simulator import profiles
from actbench.tools.fit.records import PlannedStep
from actbench.units import counted, format_bytes
from actbench.workload.optimizers import SGD_RATE, TRAINERS, code_of

INSTEAD: Final = "# instead: "
"""Begins a line that may stand in place of the one above."""

NEAREST: Final = 0.28
BY_CHANCE: Final = 0.65
"""Shares of the weights of a small Llama that change in ten steps of AdamW at a rate of 2e-5, with weights of bfloat16.

They are rounded to the nearest, or up or down by chance; ``tests/tools/fit/test_rounding.py`` counts them.
"""

_RATE: Final = "2e-5"  # usual in fine-tuning; users set their own
_ADAPTERS_RATE: Final = "2e-4"
"""Of adapters: LoRA's for GPT-2 and GPT-3 (arXiv 2106.09685, tables 11 and 12), QLoRA's for 7B and 13B (2305.14314)."""

_OPTIMIZER_CLASS: Final = "AdamW"  # stands for that of a model that does not bring one
_BY_CHANCE_CODE: Final = f"torchao.optim._AdamW({{}}, lr={_RATE}, bf16_stochastic_round=True)"
"""An optimizer of torchao that keeps moments in the type of the weights as torch's do."""

_LONGEST_LINE = 80
_WRITING: frozenset[Task] = frozenset(("causal-lm", "seq2seq-lm", "speech-seq2seq", "image-text-to-text"))
_OF_MODEL: Final[frozenset[Change]] = OF_PARTS | {"loss"}


def pieces_of(plans: Iterable[tuple[str, PlannedStep]], most: int) -> tuple[tuple[str, str], ...]:
    """Return the pieces of code of the first named plans that change something, each with its heading."""
    found: list[tuple[str, str]] = []
    for name, plan in [(name, plan) for name, plan in plans if not plan.is_unchanged][:most]:
        pieces = _for_model(plan) if plan.case.script is None else _for_script(plan, plan.case.script)
        found += [(f"{name}: {what}", text) for what, text in pieces]
    return tuple(found)


def _for_model(plan: PlannedStep) -> Iterator[tuple[str, str]]:
    """Yield the code that trains a model by a plan, and the command that measures it."""
    code = code_for(plan.case, plan.measurement)
    yield "a loop of your own", code.loop
    with_trainer = f"{'with' if code.trainer else 'not with'} transformers' Trainer"
    yield with_trainer, code.trainer or f"# {code.why_no_trainer}\n"
    yield "the command that measures it on the device", f"{code.command}\n"


def _for_script(plan: PlannedStep, script: Script) -> Iterator[tuple[str, str]]:
    """Yield what to paste into a script, and the command that shows all of the plan's step."""
    case, lines = plan.case, []
    for line in lines_for(case.scheme, plan.measurement.optimizer) if case.scheme != "exact" else ():
        is_of_model = line.startswith("model")
        where = "where the model is made, before its optimizer is" if is_of_model else "after its optimizer is made"
        lines += [f"# {where}", line]
    if lines:
        modules = ("actbench", "actbench.optim", "torchao.optim", "bitsandbytes.optim")
        yield f"in {script.target}", "\n".join([*_imports("".join(lines), modules), *lines]) + "\n"
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
    limit = profile.step_bytes(case.memory_limit_bytes)
    words = [f"actbench run --device-profile {shlex.quote(case.device_profile or profile.name)}"]
    words += [f"--memory-limit {limit}B"] if limit != profile.step_bytes() else []
    words += [f"--batch-size {script.batch_size}"] if script.batch_size else []
    words += [f"-s {shlex.quote(case.scheme)}"] if case.scheme != "exact" else []
    yield "simulated again, with what holds the memory", f"{' '.join(words)} {script.text}\n"


def lines_for(spec: str, optimizer: str | None) -> list[str]:
    """Return lines of Python to paste: one where a script makes its model, and one after its ``optimizer`` is made."""
    parts = [(part, part.facet(OwnOptimizer)) for part in parts_in(schemes.build(spec))]
    of_model = "+".join(filter(None, (part.spec if own is None else own.of_model for part, own in parts)))
    kind = "Adam" if optimizer == "Adam" else "AdamW"
    lines = [f"model = actbench.convert(model, {_literal(of_model)})"] if of_model else []
    for code in (own.code for _, own in parts if own is not None):
        code = code.replace("{kind}", kind).replace("{rate}", "lr").replace("(trained,", "(model.parameters(),")
        lines.append(f"optimizer = {code.replace('{}', 'optimizer')}")
    return lines


def _literal(spec: str, indent: str = "") -> str:
    """Return a specification as a text in Python; a long one has a line for each scheme."""
    if len(spec) <= _LONGEST_LINE:
        return f'"{spec}"'
    first, *others = spec.split("+")
    lines = [f'"{first}"', *(f'"+{each}"' for each in others)]
    return "".join(f"\n{indent}    {line}" for line in lines) + f"\n{indent}"


def _imports(code: str, modules: Iterable[str] = ("actbench.optim", "actbench.workload.optimizers")) -> list[str]:
    return [f"import {module}" for module in modules if f"{module}." in code]


# -- a loop, the Trainer, the command --------------------------------------------------------------------------------


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
    parts = _parts(case)
    own = measured.optimizer if case.optimizer is None and measured.optimizer != _OPTIMIZER_CLASS else None
    kept = _remedy(case, parts, measured)
    found = [_pasted(part, case.batch_size) for part in parts]
    why_not = [each.why_not for each in found if each.why_not]
    if _loss_of(measured.built) == _LOSS_OF_SCORES:
        why_not.append("Trainer takes models that return their own loss")
    trainer = None if why_not else _trainer(case, measured.built, own, kept, found)
    return Code(_loop(case, parts, measured.built, own, kept), trainer, "; ".join(why_not), _command(case))


def _parts(case: Case) -> Sequence[Scheme]:
    return () if case.scheme == "exact" else parts_in(schemes.build(case.scheme))


def _loop(case: Case, parts: Sequence[Scheme], built: Built | None, own: str | None, kept: _Remedy) -> str:
    own_loss = f"loss, the function that {case.model} returns, " if is_function(case.model) else ""
    trains_others = any("parameters" in part.changes for part in parts)
    trained = "[each for each in model.parameters() if each.requires_grad]" if trains_others else "model.parameters()"
    made = code_of(case.optimizer or OPTIMIZER, trained, _rate(case))
    batches = f"batches, each a dictionary of tensors there with {counted(case.batch_size, 'row')}"
    lines = [f"# Yours: model, on its device, {own_loss}{_YOURS.format(own) if own else ''}and {batches}."]
    lines += ["import torch", "import actbench", *_imports(made)]
    lines += [f"{INSTEAD}import torchao.optim"] if kept.optimizer else []
    lines += [] if own_loss else ["", "def loss(model, batch):  # yours", f"    return {_loss_of(built)}", "", ""]
    lines += [
        *kept.comments,
        *_prepared(case, built),
        "setup = actbench.TrainingSetup(",
        "    model,",
        "    loss=loss,",
    ]
    lines += [f"    make_optimizer={'make_optimizer' if own else f'lambda model: {made}'},"]
    if kept.optimizer:
        lines.append(f"    {INSTEAD}make_optimizer=lambda model: {kept.optimizer.format(trained)},")
    types = [f"autocast=torch.{case.autocast}"] if case.autocast else []
    types += [f"inputs=torch.{case.dtype}"] if case.dtype not in (None, "float32") else []
    lines += [f"    precision=actbench.Precision({', '.join(types)}),"] if types else []
    lines += [")"]
    lines += [f"setup = actbench.apply(setup, {_literal(case.scheme)})"] if parts else []
    lines += [f'{INSTEAD}setup = actbench.apply(setup, "{kept.scheme}")'] if kept.scheme else []
    if case.autocast == "float16" or any(each.scales_loss for each in _precisions(parts)):
        lines += [
            f'optimizer, scaler = setup.make_optimizer(setup.module), torch.amp.GradScaler("{_device(case)}")',
            "for batch in batches:",
            "    for part in setup.cut(batch):",
            "        scaler.scale(setup.forward(part.batch) * part.share).backward()",
            "    scaler.step(optimizer)",
            "    scaler.update()",
            "    optimizer.zero_grad()",
        ]
    else:
        lines += ["step = actbench.TrainStep(setup)", "for step.batch in batches:", "    print(float(step()))"]
    return _text(lines)


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines).replace(", \n", ",\n") + "\n"


def _device(case: Case) -> str:
    return "cuda" if profiles.get(case.device_profile or profiles.DEFAULT).is_cuda else "cpu"


def _precisions(parts: Iterable[Scheme]) -> list[LowPrecision]:
    return [each for part in parts if (each := part.facet(LowPrecision)) is not None]


_YOURS: Final = "make_optimizer, from the model to its {}, "
_LOSS_OF_SCORES: Final = 'torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])'


def _loss_of(built: Built | None) -> str:
    """Return the code of a loss: the model's own (transformers), of scores (torchvision), or what it returns."""
    if built is None or built.task is None:
        return "model(**batch)"
    has_scores = built.task == "image-classification" and not built.model_class.endswith("ForImageClassification")
    return _LOSS_OF_SCORES if has_scores else "model(**batch).loss"


def _prepared(case: Case, built: Built | None) -> list[str]:
    """Return the lines that prepare the model for the scheme."""
    writes = built is not None and built.task in _WRITING
    lines = ["model.config.use_cache = False  # what generation would keep"] if writes else []
    return lines + ([f"model = model.to(torch.{case.dtype})"] if case.dtype not in (None, "float32") else [])


def _rate(case: Case) -> str:
    """Return the learning rate in code, which users replace by their own."""
    if (case.optimizer or OPTIMIZER).startswith("sgd"):
        return f"{SGD_RATE:g}"
    return _ADAPTERS_RATE if any("parameters" in part.changes for part in _parts(case)) else _RATE


@dataclass(frozen=True)
class _Pasted:
    """The lines of Python that use a scheme beside ``Trainer``.

    Attributes:
        spec: The specification by which the model is converted.
        is_early: Whether that has to be before the trainer is made, which the callback is too late for.
        before: A line before the trainer is made, about ``model``.
        arguments: Arguments of ``TrainingArguments``, as code.
        optimizer: The code of :class:`~actbench.scheme.facets.OwnOptimizer`.
        why_not: Why Trainer cannot use the scheme.
    """

    spec: str = ""
    is_early: bool = False
    before: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    why_not: str = ""


def _pasted(part: Scheme, batch_size: int) -> _Pasted:
    """Return the lines for a scheme that is no composition, with batches of so many rows."""
    own, precision = part.facet(OwnOptimizer), part.facet(LowPrecision)
    settings: dict[Change, object] = {"optimizer": own, "precision": precision, "batch": part.card.trainer}
    can = {*_OF_MODEL, "memory format", *(change for change, setting in settings.items() if setting)}
    if not can.issuperset(part.changes):
        beyond = " and ".join(sorted(set(part.changes) - _OF_MODEL))
        return _Pasted(why_not=f"{part.spec} changes {beyond}, which Trainer does itself")
    before = ""
    if precision and precision.of_weights:
        before = f"model = model.to(torch.{precision.dtype})"
    elif "memory format" in part.changes:  # the first convolution converts the images
        before = "model = model.to(memory_format=torch.channels_last)"
    arguments = {argument: str(getattr(part, name)) for argument, name in part.card.trainer.items()}
    if steps := arguments.get("gradient_accumulation_steps"):
        arguments["per_device_train_batch_size"] = str(-(-batch_size // int(steps)))
    if precision and not precision.of_weights:  # Trainer scales the loss of float16
        arguments["bf16" if precision.dtype == "bfloat16" else "fp16"] = "True"
    spec = own.of_model if own else "" if _OF_MODEL.isdisjoint(part.changes) else part.spec
    is_early = "parameters" in part.changes  # Trainer makes its optimizer before it calls callbacks
    return _Pasted(spec, is_early, before, arguments, own.code if own else "")


def _trainer(case: Case, built: Built | None, own: str | None, kept: _Remedy, found: Sequence[_Pasted]) -> str:
    """Return the lines for Trainer."""
    callback = "+".join(each.spec for each in found if each.spec)
    before = [*kept.comments, *_prepared(case, built), *(each.before for each in found if each.before)]
    if any(each.is_early for each in found):  # the callback converts too, and a model is converted only once
        before, callback = [*before, f"model = actbench.convert(model, {_literal(callback)})"], ""
    optimizer = _optimizer_of_trainer(case, found, own)
    other = kept.optimizer.format("trained")
    if kept.scheme:
        by_chance = case.model_copy(update={"scheme": kept.scheme})
        other = _optimizer_of_trainer(by_chance, [_pasted(each, case.batch_size) for each in _parts(by_chance)], own)
    arguments = {"per_device_train_batch_size": str(case.batch_size), "learning_rate": _rate(case)}
    if not optimizer:
        arguments["optim"] = f'"{TRAINERS[case.optimizer or OPTIMIZER]}"'
    if case.autocast is not None:
        arguments["bf16" if case.autocast == "bfloat16" else "fp16"] = "True"
    for each in found:
        arguments |= each.arguments
    half = next((each.dtype for each in _precisions(_parts(case)) if each.of_weights), case.dtype)
    reads_floats = built is not None and (built.image_size is not None or built.audio_shape is not None)
    casts = half not in (None, "float32") and reads_floats  # Trainer leaves batches in float32
    if casts:
        cast = f"value.to(torch.{half}) if value.is_floating_point() else value"
        before += ["def in_type(rows):"]
        before += [f"    return {{name: {cast} for name, value in default_data_collator(rows).items()}}"]
    lines = [f"# Yours: model, {_YOURS.format(own) if own else ''}and data, a data set of dictionaries."]
    about_loss = f"# Trainer calls no loss of {case.model}: the model returns its loss, or you override compute_loss."
    lines += [about_loss] if is_function(case.model) else []
    lines += ["import torch"] if "torch." in "".join([optimizer, *before]) else []
    lines += [f"import {library}.optim" for library in ("torchao", "bitsandbytes") if f"{library}." in optimizer]
    lines += [f"{INSTEAD}import torchao.optim"] if "torchao." in other and "torchao." not in optimizer else []
    lines += ["import actbench"] if any("actbench." in text for text in before) else []
    lines += _imports(optimizer)
    lines += [f"from transformers import Trainer, TrainingArguments{', default_data_collator' if casts else ''}"]
    lines += ["from actbench.tools.trainers.huggingface import ActbenchCallback"] if callback else []
    lines += ["", *before]
    trained = "trained = [each for each in model.parameters() if each.requires_grad]"
    lines += [trained] if "trained" in optimizer + other else []
    lines += ["arguments = TrainingArguments(", '    "out",']
    lines += [f"    {name}={value}," for name, value in arguments.items()] + [")"]
    lines += ["trainer = Trainer(", "    model=model,", "    args=arguments,", "    train_dataset=data,"]
    lines += ["    data_collator=in_type,"] if casts else []
    lines += [f"    callbacks=[ActbenchCallback({_literal(callback, '    ')})],"] if callback else []
    lines += [f"    optimizers=({optimizer}, None),"] if optimizer else []
    lines += [f"    {INSTEAD}optimizers=({other}, None),"] if other else []
    return _text([*lines, ")", "trainer.train()"])


def _optimizer_of_trainer(case: Case, found: Sequence[_Pasted], own: str | None) -> str:
    """Return the code of the optimizer for Trainer; empty for Trainer's own."""
    wraps = [each.optimizer for each in found if each.optimizer]
    if not wraps and not own and (case.optimizer or OPTIMIZER) in TRAINERS:
        return ""
    code = "make_optimizer(model)" if own else code_of(case.optimizer or OPTIMIZER, "trained", _rate(case))
    kind = "Adam" if case.optimizer == "adam" else "AdamW"
    for wrap in wraps:
        code = wrap.replace("{rate}", _rate(case)).replace("{kind}", kind).replace("{}", code)
    return code


def _command(case: Case) -> str:
    words = ["actbench measure", shlex.quote(case.model), f"-s {shlex.quote(case.scheme)}", f"-b {case.batch_size}"]
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
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
        ("memory-limit", f"{profile.step_bytes(case.memory_limit_bytes)}B", f"{profile.step_bytes()}B"),
        ("meter", _device(case), None),
    ):
        words += [f"--{flag} {value}"] if value not in (None, usual) else []
    return " ".join([*words, *(["--trust-remote-code"] if case.trust_remote_code else [])])


# -- small updates of bfloat16 weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Remedy:
    """What keeps small updates of bfloat16 weights.

    Attributes:
        scheme: The scheme of the case with stochastic rounding; empty if it cannot round so.
        optimizer: The optimizer in place of the case's, as code with ``{}`` for the parameters; empty if there is none.
        comments: What the weights lose of updates, and what keeps them.
    """

    scheme: str = ""
    optimizer: str = ""
    comments: Sequence[str] = ()


def _remedy(case: Case, parts: Sequence[Scheme], measured: Measurement) -> _Remedy:
    """Return what keeps small updates; nothing if no trained weight is of bfloat16, or if updates are kept already."""
    is_half = (case.dtype or measured.dtype or "").startswith("bfloat16")
    is_half |= any(each.of_weights and each.dtype == "bfloat16" for each in _precisions(parts))
    if not is_half or any("parameters" in part.changes for part in parts):  # adapters are of float32
        return _Remedy()
    rounding = {id(part) for part in parts if (own := part.facet(OwnOptimizer)) and own.rounds_by_chance is not None}
    update = {"bf16_stochastic_round": True}
    specs = [part.model_copy(update=update).spec if id(part) in rounding else part.spec for part in parts]
    spec = schemes.build("+".join(specs)).spec if rounding else ""
    if spec == case.scheme:
        return _Remedy()
    is_own = case.optimizer is None and measured.optimizer != _OPTIMIZER_CLASS
    is_adamw = not is_own and (case.optimizer or OPTIMIZER) in ("adamw", "adamw-fused")
    is_free = not any(OPTIMIZER_STATE in part.claims for part in parts)
    optimizer = _BY_CHANCE_CODE if is_free and is_adamw else ""
    nearest, by_chance = f"{100 * NEAREST:.0f} %", f"with stochastic rounding {100 * BY_CHANCE:.0f} %"
    lines = [
        "The weights are bfloat16, which rounds small updates away. An example: in ten steps of AdamW at a learning",
        f"rate of {_RATE}, {nearest} of a small Llama's weights change. In float32 all do, {by_chance}.",
    ]
    if optimizer or spec:
        lines.append("Lines that begin with 'instead' round stochastically, in the same bytes; they need torchao.")
    need, limit = needed_bytes(measured), measured.memory_limit_bytes
    most = 2 * need + measured.weights_bytes  # all takes twice the bytes, and operators read copies of the weights
    if limit is not None and most <= limit:
        others = "+".join(part.spec for part in parts if "precision" not in part.changes)
        at_most = f"at most {format_bytes(most)} of {format_bytes(limit)}"
        in_float32 = {"dtype": "float32", "autocast": "bfloat16", "scheme": others or "exact"}
        lines += [
            "The same plan with float32 weights and autocast to bfloat16 loses no update and fits, too. It needs more",
            f"than this one's {format_bytes(need)}, but {at_most}. To measure it:",
            f"  {_command(case.model_copy(update=in_float32))}",
        ]
    elif not (optimizer or spec):
        lines.append("Float32 weights with autocast to bfloat16 keep small updates, and need about twice the memory.")
    return _Remedy(spec, optimizer, [f"# {line}" for line in lines])
