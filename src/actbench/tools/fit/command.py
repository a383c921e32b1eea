"""The verb fit: how a model fits on a card, what it costs, and the code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from actbench.cli.app import Exit, command, count_option, one_of, option, seconds_option
from actbench.cli.clusters import ClusterFlags
from actbench.cli.flags import ModelArgument, OutputOption, StepFlags, TimeoutOption, expanded
from actbench.cli.givenschemes import checked_schemes, schemes_from
from actbench.cli.printing import ExportFlags, command_line, export, progress_shown, readers, remark, show
from actbench.errors import UsageError
from actbench.model.declared import check_device_profile, check_model
from actbench.model.records import Case, Optimizer
from actbench.tools.fit.asking import QuestionFlags
from actbench.units import parse_bytes

if TYPE_CHECKING:
    from actbench.tools.fit.fit import Fit
    from actbench.tools.fit.questions import Answer
    from actbench.tools.fit.records import Asked


def _optimizer(text: str) -> str:
    return one_of(text, get_args(Optimizer))


@dataclass(frozen=True)
class FitFlags(StepFlags):
    """Flags: what must fit, and on which card."""

    device_profile: Annotated[
        str | None,
        option(
            "--device-profile",
            "The card, such as rtx-4090: a name that actbench devices lists with times, or a .toml file.",
            metavar="NAME|FILE",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[int, count_option("--batch-size -b", "Rows of the batch of a step.", metavar="ROWS")] = 8
    memory_limit: Annotated[
        str | None,
        option("--memory-limit", "Memory that a step may use, such as 20GiB (default: the card's).", metavar="SIZE"),
    ] = None
    optimizer: Annotated[
        list[str] | None,
        option(
            "--optimizer",
            "As for measure; fit changes it only for another implementation of the same. Repeat to name others that "
            "may replace the first.",
            metavar="NAME",
            parser=_optimizer,
            show_default=False,
        ),
    ] = None


@command()
@expanded
def fit(
    *,
    model: ModelArgument,
    flags: FitFlags,
    among: Annotated[
        list[str] | None,
        option(
            "--scheme -s",
            "Plan only with these schemes, such as checkpoint, adam8bit or gact:L2. Repeat for more.",
            metavar="SPEC",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str,
        option("--base", "Schemes that every plan has, and the exact step too, such as lora:16.", metavar="SPEC"),
    ] = "exact",
    max_slowdown: Annotated[
        float,
        option("--max-slowdown", "Most time that a plan may take, in multiples of the exact step's estimate.", min=1.0),
    ] = 2.0,
    max_gradient_error: Annotated[
        float | None,
        option(
            "--max-gradient-error",
            "Largest relative error of the gradient (L2), as measure has it, such as 0.1; errors are measured on a "
            "small copy of the model on this machine's CPU.",
            min=0.0,
            show_default=False,
        ),
    ] = None,
    exact: Annotated[
        bool, option("--exact", "Only plans with the exact step's gradients, updates and precision, to rounding.")
    ] = False,
    measure: Annotated[
        bool,
        option("--measure", "Measure the first three on this machine's device, and show the errors of the estimates."),
    ] = False,
    show_code: Annotated[int, count_option("--code", "Print the code of the first N plans.", least=0, metavar="N")] = 1,
    jobs: Annotated[
        int | None,
        count_option(
            "--jobs -j",
            "Cases that are simulated at a time (default: one a core here).",
        ),
    ] = None,
    budget: Annotated[
        float, seconds_option("--budget", "Seconds, once all is loaded, after which nothing new is simulated.", least=1)
    ] = 120.0,
    timeout: TimeoutOption = 1800.0,
    quiet: Annotated[bool, option("--quiet", "Show no progress.")] = False,
    questions: QuestionFlags,
    nodes: ClusterFlags,
    output: OutputOption = Path("results/fit"),
    exports: ExportFlags,
) -> None:
    """Plan how a training step fits on a card: what to do with each block, what it costs, and the code to paste.

    Single changes are simulated for the card, mostly on a copy with three blocks: recomputing, packing or moving what
    blocks save, micro-batches, the loss in pieces, optimizers, precision, adapters. What they save and cost adds up, so
    the fastest plan within the memory is solved for, not searched. It is simulated whole, with the limit set, and
    solved again if it needs more than was added up. Only plans that were simulated whole are shown.

    First comes the answer: the fastest plan with exact gradients, and the fastest of all. Tables have the fastest plan
    for each way in which training may change, and the frontiers of memory and time. Plans that train adapters instead
    of the model's parameters have their own table. Run the same command again to continue a stopped fit. On a machine
    with the card, --measure runs the first three plans and shows the errors of the estimates.

    Exit status: 0 something fits within --max-slowdown, with adapters or without, 1 nothing does, 2 wrong usage.

    Examples:

    actbench fit llama-3.1-8b --device-profile rtx-4090 --sequence-length 2048 --dtype bfloat16 --batch-size 1

    actbench fit roberta-base --device-profile rtx-4060 --batch-size 128 --exact

    actbench fit resnet50 --device-profile v100-16gb --batch-size 256 --max-slowdown 1.5 --export-markdown fit.md

    actbench fit qwen3-0.6b --device-profile rtx-4090 --batch-size 8 --sequence-length 4096 --measure

    actbench fit train.py:build --device-profile rtx-3090 --memory-limit 20GiB --budget 600

    actbench fit llama-3.1-8b --device-profile rtx-4090 --sequence-length 2048 --dtype bfloat16 -b 2 --base lora:16

    actbench fit llama-3.1-8b --device-profile rtx-4090 --batch-size 1 --dtype bfloat16 --longest-sequence

    actbench fit llama-3.1-8b --device-profile h100-80gb --batch-size 4 --cluster ray://head:10001
    """
    machines = nodes.chosen
    questions.check(
        measure=measure,
        device_profile=flags.device_profile,
        memory_limit=flags.memory_limit,
        base=base,
        max_gradient_error=max_gradient_error,
    )
    checked_schemes([base], "--base")
    checked_schemes(among or [], "--scheme")
    case, asked = _asked(model, flags, max_slowdown, exact)
    asked = asked.model_copy(update={"max_gradient_error": max_gradient_error})

    from actbench.report.render.formats import json_lines
    from actbench.tools.fit.fit import fit as find
    from actbench.tools.fit.fitting import Means
    from actbench.tools.fit.pieces import pieces_of
    from actbench.tools.fit.tables import FIT_TITLE, tables_of

    case = case.model_copy(update={"scheme": _of_all(base)})
    with schemes_from("--scheme"):
        schemes = _alone(among)
    with progress_shown(
        "; what was simulated is stored, and the same command goes on from there", silent=quiet
    ) as progress:
        means = Means(output, command_line(), schemes, jobs, budget, timeout, progress, machines)
        answer = questions.answer(case, asked, means)
        if answer is None:
            found = find(
                case,
                asked=asked,
                schemes=schemes,
                output=output,
                measure=measure,
                command=command_line(),
                jobs=jobs,
                budget_seconds=budget,
                timeout_seconds=timeout,
                progress=progress,
                machines=machines,
            )
    if answer is not None:
        _show_answer(answer, exports, show_code)
        return
    verdict = "" if found.is_possible else _verdict(found)
    tables = list(tables_of(found.found, FIT_TITLE, verdict))
    chosen = [each for adapters in (False, True) for each in found.found.shortlist(adapters=adapters)[:show_code]]
    tables[0] = replace(tables[0], code=pieces_of(chosen))
    show(*tables, beside=exports)
    export(exports, tables, lambda: json_lines(found.records))
    _print_code(tables[0].code, exports)
    _remarks(found)
    if not found.is_possible:
        remark(verdict)
        raise Exit(1)


def _show_answer(answer: Answer, exports: ExportFlags, show_code: int) -> None:
    from actbench.report.render.formats import json_lines
    from actbench.tools.fit.pieces import pieces_of

    show(*answer.tables, beside=exports)
    export(exports, answer.tables, lambda: json_lines(answer.records))
    _print_code(pieces_of(answer.chosen[:show_code]), exports)
    for text in answer.remarks:
        remark(text)
    if not answer.is_possible:
        raise Exit(1)


def _asked(model: str, flags: FitFlags, max_slowdown: float, exact: bool) -> tuple[Case, Asked]:
    from actbench.tools.fit.records import Asked

    if flags.device_profile is not None:
        check_device_profile(flags.device_profile)
    check_model(model)
    given = flags.given(set(Case.model_fields) - {"optimizer"})
    chosen = flags.optimizer or []
    optimizer, others = (chosen[0], chosen[1:]) if chosen else (None, [])
    limit = {} if flags.memory_limit is None else {"memory_limit_bytes": parse_bytes(flags.memory_limit)}
    case = Case(**{**given, **limit, "model": model, "optimizer": optimizer})
    return case, Asked(max_slowdown=max_slowdown, exact=exact, optimizer=optimizer, others=tuple(others))


def _of_all(base: str) -> str:
    """Return the schemes that every plan has, in canonical form.

    Raises:
        SpecError: There is no such scheme, or they do not stand together.
        UsageError: They spread the model over processes.
    """
    from actbench.errors import ConversionError
    from actbench.scheme import build
    from actbench.scheme.composed import refuse_spread

    with schemes_from("--base"):
        scheme = build(base)
    try:
        refuse_spread(scheme, f"--base {base}: a fit is of one process", "'actbench sweep' simulates stacks of it")
    except ConversionError as error:
        raise UsageError(str(error)) from None
    return scheme.spec


def _alone(among: list[str] | None) -> list[str] | None:
    """Return the schemes to choose from in canonical form, each once.

    Raises:
        SpecError: There is no such scheme.
        UsageError: A specification is a stack of several schemes.
    """
    from actbench.scheme import build
    from actbench.scheme.composed import Composed

    if among is None:
        return None
    built = {text: build(text) for text in among}
    stack = next((text for text, scheme in built.items() if isinstance(scheme, Composed)), None)
    if stack is not None:
        raise UsageError(f"--scheme {stack}: fit combines schemes itself; name them one by one, each with --scheme")
    return list(dict.fromkeys(scheme.spec for scheme in built.values() if scheme.spec != "exact"))


def _print_code(pieces: Sequence[tuple[str, str]], exports: ExportFlags) -> None:
    for heading, text in pieces:
        print(f"\n# {heading}\n{text}", file=readers(exports))


def _verdict(found: Fit) -> str:
    from actbench.tools.fit.answer import impossible

    return impossible(
        found.found, knows_least=found.knows_least, least_profile=found.least_profile, has_more=found.has_more
    )


def _remarks(found: Fit) -> None:
    known = sum(record.case.meter == "simulated" for record in found.records) - found.simulated
    remark(f"{found.simulated} cases simulated whole, {known} taken from the results file")
    if found.path is not None:
        remark(f"results: {found.path} (tables in the same folder, as .md and .csv)")
    for why in found.refused:
        remark(f"not for this model: {why}")
    for why in found.kept:
        remark(why)
    if found.is_over and found.is_possible:
        remark("the time of --budget ended before all plans were simulated; the same command goes on from there")
