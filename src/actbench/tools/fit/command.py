"""The verb fit: how a model fits on a card, what it costs, and the code to paste."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from actbench.cli import completions
from actbench.cli.app import Exit, argument, command, count_option, named, one_of, option, seconds_option
from actbench.cli.clusters import ClusterFlags
from actbench.cli.flags import MODELS, OutputOption, StepFlags, TimeoutOption, device_option, expanded
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
from actbench.cli.schemeargs import checked_schemes, schemes_from
from actbench.errors import UsageError
from actbench.model.declared import check_model, check_scheme
from actbench.model.records import Case, Optimizer
from actbench.model.scripts import Script
from actbench.tools.fit.budget import BUDGET_SECONDS, LONG_BUDGET_SECONDS
from actbench.units import MOST_PROCESSES, parse_bytes

if TYPE_CHECKING:
    from actbench.tools.fit.cache import Shown
    from actbench.tools.fit.records import Asked
    from actbench.tools.fit.simulations import Means

RESULTS: Final = Path("fit-results")
"""Where simulations are stored by default: in a folder of their own, since a clone of actbench tracks ``results``."""

ROWS: Final = 8
"""Rows of a batch by default."""


def _optimizer(text: str) -> str:
    return one_of(text, get_args(Optimizer))


@dataclass(frozen=True)
class FitFlags(StepFlags):
    """Flags: what must fit, and on which card."""

    device_profile: Annotated[
        str | None,
        device_option(
            "The card, such as rtx-4090: a name that actbench devices lists with times, or a .toml file.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        count_option(
            "--batch-size -b",
            f"Rows of the batch of a step (default {ROWS}; a script's own).",
            metavar="ROWS",
            show_default=False,
        ),
    ] = None
    memory_limit: Annotated[
        str | None,
        option(
            "--memory-limit",
            "Memory that a step may use, such as 20GiB, taken as given (default: the card's without 0.5 GiB for its "
            "CUDA context).",
            metavar="SIZE",
        ),
    ] = None
    optimizer: Annotated[
        list[str] | None,
        option(
            "--optimizer",
            "As for measure; fit replaces it only with another implementation of the same optimizer. Repeat to name "
            "optimizers that may replace the first.",
            metavar="NAME",
            parser=_optimizer,
            autocompletion=completions.optimizers,
            show_default=False,
        ),
    ] = None
    script: Annotated[
        str | None,
        option(
            "--script",
            "Plan for a training script, in place of MODEL: as python takes it, with its arguments, in quotes. Its own "
            "lines set batch, types and optimizer.",
            only_typed=True,
            metavar='"FILE.py ARGS"',
            parser=named,
            show_default=False,
        ),
    ] = None

    def case(self, model: str | None, *, elsewhere: bool = False) -> Case:
        """Return the case of the exact step; ``elsewhere`` is that of :func:`check_model`.

        Raises:
            UsageError: A flag is wrong, or none says what has to fit.
            ModelError: There is no such model.
        """
        limit = {} if self.memory_limit is None else {"memory_limit_bytes": parse_bytes(self.memory_limit)}
        if self.script is not None:
            script = self._script(self.script)
            given = {"batch_size": self.batch_size or 1, "device_profile": self.device_profile, **limit}
            seed = {} if self.seed is None else {"seed": self.seed}
            return Case(model=script.text, script=script, gradient_quality=False, **given, **seed)
        if model is None:
            raise UsageError("name the MODEL that is to fit, such as llama-3.2-1b, or a training script by --script")
        check_model(model, elsewhere=elsewhere)
        given = {"batch_size": ROWS, **self.given(set(Case.model_fields) - {"optimizer", "script"})}
        return Case(**{**given, **limit, "model": model, "optimizer": next(iter(self.optimizer or ()), None)})

    def _script(self, text: str) -> Script:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--script {text}: {error}".lower()) from None
        is_module = words[0] == "-m"
        target, *arguments = words[is_module:] or [""]
        if not target:
            raise UsageError(f"--script {text}: name the module behind -m")
        return Script(target=target, is_module=is_module, arguments=tuple(arguments), batch_size=self.batch_size)

    def asked(self, **more: Any) -> Asked:
        """Return the request, with ``more`` of its fields."""
        from actbench.tools.fit.records import Asked

        chosen = self.optimizer or []
        return Asked(optimizer=next(iter(chosen), None), others=tuple(chosen[1:]), **more)


def _processes(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        found = 0
    if not 2 <= found <= MOST_PROCESSES:
        raise UsageError(f"--processes {text}: give a whole number from 2 to {MOST_PROCESSES}")
    return found


@dataclass(frozen=True)
class QuestionFlags:
    """Flags: what is asked of a model and a card."""

    longest_sequence: Annotated[
        bool,
        option(
            "--longest-sequence",
            "Find the longest sequence with which a step fits, for each way of training; one token more is simulated, "
            "too.",
        ),
    ] = False
    largest_batch: Annotated[
        bool,
        option(
            "--largest-batch",
            "Find the largest batch that fits in one pass, without micro-batches; one row more is simulated, too.",
        ),
    ] = False
    which_card: Annotated[
        bool,
        option("--which-card", "List the cards on which a step fits, the smallest first, and how fast it is there."),
    ] = False

    processes: Annotated[
        list[int] | None,
        option(
            "--processes",
            "Train on N processes with a card each, by the fastest of fsdp, zero1, ddp, tp, and tp combined with one "
            "of these; the batch size is that of one process. Repeat to find the smallest N that fits.",
            metavar="N",
            parser=_processes,
            show_default=False,
        ),
    ] = None

    @property
    def asks(self) -> bool:
        """Whether anything is asked but which plan is fastest."""
        return any(vars(self).values())

    def answer(self, case: Case, asked: Asked, means: Means, show_code: int) -> Shown:
        """Return the answer to the question that is asked."""
        from actbench.tools.fit import questions

        if self.which_card:
            return questions.which_card(case, asked, means, show_code)
        if self.processes:
            return questions.over_processes(case, self.processes, asked, means, show_code)
        axis: questions.Axis = "sequence_length" if self.longest_sequence else "batch_size"
        return questions.largest(case, axis, asked, means, show_code)


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
    if flags.device_profile is None and not questions.which_card:
        raise UsageError(
            "--device-profile: name the card that the step is to fit on, such as rtx-4090; 'actbench devices' "
            "lists them, and --which-card finds one"
        )
    with schemes_from("--base"):
        check_scheme(base)
    checked_schemes(among or [], "--scheme")
    case = flags.case(model, elsewhere=elsewhere is not None)
    seconds = budget or (LONG_BUDGET_SECONDS if case.script is not None or questions.asks else BUDGET_SECONDS)
    asked = flags.asked(max_slowdown=max_slowdown, exact=exact, max_gradient_error=max_gradient_error)

    from actbench.tools.fit.cache import CachedAnswer

    flags_of_answer = {
        "asked": asked.model_dump(mode="json"),
        "questions": vars(questions),
        "on": [nodes.cluster, timeout],
        "shows": [measure, show_code, progress.verbose],
    }
    cached = CachedAnswer(case, [base, *(among or [])], flags_of_answer, output or RESULTS)
    if (shown := cached.read()) is not None:
        _show(shown, exports)
        return

    from actbench.run.executor import COMPILER
    from actbench.run.processes import ForkServer
    from actbench.tools.fit import scripts

    # its imports and those of this process take seconds each: they go on side by side
    server = ForkServer(scripts.bench_of(case), (COMPILER,)) if elsewhere is None else None
    kept = "; what was simulated is stored, and the same command goes on from there"
    with server or nullcontext(), progress_shown(kept, progress) as told:
        from actbench.run.local import ThisMachine
        from actbench.tools.fit.fit import find
        from actbench.tools.fit.plan import base_of, singles_of
        from actbench.tools.fit.simulations import Means

        machines = elsewhere or ThisMachine(server=server)
        with schemes_from("--base"):
            case = case.model_copy(update={"scheme": base_of(base)})
        with schemes_from("--scheme"):
            schemes = None if among is None else singles_of(among)
        if case.script is not None:
            scripts.check(case.script, [("--base", case.scheme), *(("--scheme", spec) for spec in schemes or ())])
        means = Means(output, command_line(), schemes, jobs, seconds, timeout, told, machines)
        if questions.asks:
            shown = questions.answer(case, asked, means, show_code)
        else:
            shown = find(case, asked, means, measure=measure).shown(show_code, verbose=progress.verbose)
    cached.write(shown)
    _show(shown, exports)


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
