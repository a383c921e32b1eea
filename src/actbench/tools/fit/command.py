"""The verb fit: how a model fits on a card, what it costs, and the code to paste."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from actbench.cli import completions
from actbench.cli.app import Exit, argument, command, count_option, named, option, seconds_option
from actbench.cli.clusters import ClusterFlags
from actbench.cli.flags import MODELS, OutputOption, TimeoutOption, expanded
from actbench.cli.givenschemes import checked_schemes, schemes_from
from actbench.cli.printing import (
    ExportFlags,
    ProgressFlags,
    command_line,
    export,
    progress_shown,
    readers,
    remark,
    show,
)
from actbench.model.declared import check_scheme
from actbench.tools.fit.asking import QuestionFlags
from actbench.tools.fit.budgets import BUDGET_SECONDS, LONG_BUDGET_SECONDS
from actbench.tools.fit.stepflags import FitFlags

if TYPE_CHECKING:
    from actbench.tools.fit.fit import Fit
    from actbench.tools.fit.questions import Answer
    from actbench.tools.fit.stored import Shown

RESULTS: Final = Path("fit-results")
"""Where simulations are stored by default: in a folder of their own, since a clone of actbench tracks ``results``."""


@command(
    rank=40,
    usual="--device-profile --batch-size --sequence-length --scheme --max-slowdown --script --longest-sequence "
    "--which-card --budget",
)
@expanded
def fit(
    *,
    model: Annotated[
        str | None,
        argument("MODEL", f"{MODELS}, if --script names no script.", named, autocompletion=completions.models),
    ] = None,
    flags: FitFlags,
    among: Annotated[
        list[str] | None,
        option(
            "--scheme -s",
            "Plan only with these schemes, such as checkpoint, adam8bit or gact:L2. Repeat for more.",
            metavar="SPEC",
            autocompletion=completions.schemes,
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str,
        option(
            "--base",
            "Schemes that every plan has, and the exact step too, such as lora:16.",
            metavar="SPEC",
            autocompletion=completions.schemes,
        ),
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
    show_code: Annotated[
        int,
        count_option("--code", "Print the code of the first N plans, those of the answer first.", least=0, metavar="N"),
    ] = 1,
    jobs: Annotated[
        int | None, count_option("--jobs -j", "Cases that are simulated at a time (default: one a core here).")
    ] = None,
    budget: Annotated[
        float | None,
        seconds_option(
            "--budget",
            "Seconds, from the end of loading, after which no simulation starts; what is at work has a quarter more "
            f"(default: {BUDGET_SECONDS:g}; {LONG_BUDGET_SECONDS:g} with --script and for other questions).",
            least=1,
        ),
    ] = None,
    timeout: TimeoutOption = 1800.0,
    progress: ProgressFlags,
    questions: QuestionFlags,
    nodes: ClusterFlags,
    output: OutputOption = RESULTS,
    exports: ExportFlags,
) -> None:
    """Plan how a training step fits on a card: what to do with each block, what it costs, and the code to paste.

    Stacks that most people know, such as lora:16+checkpoint, are simulated first, and are the first rows of the table.

    Then single changes are simulated, mostly on a copy with four blocks: recomputing, packing or moving what
    blocks save, micro-batches, the loss in pieces, optimizers, precision, adapters. Their savings and costs are added
    up, and fit computes the fastest plan that fits by these sums. Its step is joined from traces of the blocks; if it
    needs more memory than the sums said, fit computes another. The first three plans are simulated whole.

    First comes the answer: whether the model fits unchanged, the fastest plan with exact gradients, and the fastest of
    all. The table has the fastest plan for each way in which training may change, adapters among them; below are the
    frontiers of memory and time. Ctrl-C ends the search and takes the best plan so far. On a machine with the card,
    --measure runs the first three plans and shows the errors of the estimates.

    Simulations are stored in the folder fit-results, or in that of --output. Run the same command again to continue a
    stopped fit; the answer of one that ended is stored, too, and is shown again at once.

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

    actbench fit --script "train.py --lr 3e-4" --device-profile rtx-4090
    """
    elsewhere = nodes.chosen
    questions.check(flags.device_profile)
    with schemes_from("--base"):
        check_scheme(base)
    checked_schemes(among or [], "--scheme")
    case = flags.case(model, elsewhere=elsewhere is not None)
    seconds = budget or (LONG_BUDGET_SECONDS if case.script is not None or questions.asks else BUDGET_SECONDS)
    asked = flags.asked(max_slowdown=max_slowdown, exact=exact, max_gradient_error=max_gradient_error)

    from actbench.tools.fit.stored import Question

    flags_of_answer = {
        "asked": asked.model_dump(mode="json"),
        "questions": vars(questions),
        "on": [nodes.cluster, timeout],
        "shows": [measure, show_code, progress.verbose],
    }
    question = Question(case, [base, *(among or [])], flags_of_answer, output or RESULTS)
    if (shown := question.stored()) is not None:
        _show(shown, exports)
        return

    from actbench.run.processes import ForkServer
    from actbench.tools.fit import scripts

    # its imports and those of this process take seconds each: they go on side by side
    server = ForkServer(scripts.bench_of(case)) if elsewhere is None else None
    kept = "; what was simulated is stored, and the same command goes on from there"
    with server or nullcontext(), progress_shown(kept, progress) as told:
        from actbench.run.local import ThisMachine
        from actbench.tools.fit.fit import fit as find
        from actbench.tools.fit.fitting import Means
        from actbench.tools.fit.given import alone, of_all

        machines = elsewhere or ThisMachine(server=server)
        case = case.model_copy(update={"scheme": of_all(base)})
        with schemes_from("--scheme"):
            schemes = alone(among)
        if case.script is not None:
            scripts.check(case.script, [("--base", case.scheme), *(("--scheme", spec) for spec in schemes or ())])
        means = Means(output, command_line(), schemes, jobs, seconds, timeout, told, machines)
        answer = questions.answer(case, asked, means)
        if answer is None:
            found = find(case, asked, means, measure=measure)
    if answer is not None:
        shown, path, is_whole = _answered(answer, show_code), answer.path, answer.is_whole
    else:
        shown, path = _found(found, show_code, verbose=progress.verbose), found.path
        is_whole = not (found.cut_short or found.crashed)
    if is_whole and path is not None:
        question.keep(shown, path)
    _show(shown, exports)


def _answered(answer: Answer, show_code: int) -> Shown:
    from actbench.tools.fit.pieces import pieces_of
    from actbench.tools.fit.stored import Shown

    code = pieces_of(((plan.words, plan) for plan in answer.chosen), show_code)
    records = answer.records
    return Shown(answer.tables, code, answer.counted, answer.remarks, answer.is_possible, lambda: records)


def _found(found: Fit, show_code: int, *, verbose: bool) -> Shown:
    from actbench.tools.fit.answer import impossible, numbered
    from actbench.tools.fit.pieces import pieces_of
    from actbench.tools.fit.stored import Shown
    from actbench.tools.fit.tables import FIT_TITLE, tables_of

    verdict: tuple[str, ...] = ()
    if not found.is_possible:
        verdict = impossible(
            found.found,
            cut_short=found.cut_short,
            knows_least=found.knows_least,
            least_profile=found.least_profile,
            has_more=found.has_more,
        )
    tables = list(tables_of(found.found, FIT_TITLE, verdict))
    cut_short = (f"{found.cut_short} Faster plans may exist.",) if found.cut_short and found.is_possible else ()
    plans = [(f"Plan {number}", plan) for number, plan in enumerate(numbered(found.found), 1)]
    code = pieces_of(plans, show_code if found.is_possible else 0)
    tables[0] = replace(tables[0], lead=(*cut_short, *tables[0].lead, *found.about_crashed), code=code)
    results = (f"results: {found.path} (tables in the same folder, as .md and .csv)",) if found.path else ()
    remarks = (*results, *found.about_refused(each=verbose), *found.kept, *([" ".join(verdict)] if verdict else []))
    return Shown(
        tuple(tables), code, tuple(found.counts.said(found.path)), remarks, found.is_possible, lambda: found.records
    )


def _show(shown: Shown, exports: ExportFlags) -> None:
    from actbench.report.render.formats import json_lines

    show(*shown.tables, beside=exports)
    export(exports, shown.tables, lambda: json_lines(shown.records()))
    for heading, text in shown.code:
        print(f"\n# {heading}\n{text}", file=readers(exports))
    for text in (*shown.counted, *shown.remarks):
        remark(text)
    if not shown.is_possible:
        raise Exit(1)
