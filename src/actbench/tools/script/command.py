"""The verb run: a training script of the user's own, on a card that need not be there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

from actbench.cli.app import Context, argument, command, count_option, named, option
from actbench.cli.flags import DeviceFlags, OutputOption, RequireFitOption, SchemeOption, TimeoutOption, expanded
from actbench.cli.printing import (
    LiveFlags,
    ResultFlags,
    command_line,
    console,
    export,
    finish,
    progress_shown,
    readers,
    remark,
    show,
)
from actbench.cli.schemeargs import checked_schemes, schemes_from
from actbench.cli.timeline import CurveFlags, export_timelines, show_timelines, tables_of
from actbench.errors import UsageError, encodable
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.report.plain import plain
from actbench.tools.script.declared import (
    BENCH,
    FOLLOWED_UP,
    FULLY_ANSWERED,
    check_script,
    misplaced,
    name_and_title,
    with_options,
    written,
)
from actbench.units import MOST_PROCESSES, parse_bytes

Target = Annotated[
    str,
    argument(
        "SCRIPT.py|MODULE", "The script; with -m, the module. All that follows is passed to it, as python does.", named
    ),
]
Arguments = Annotated[list[str] | None, argument("ARGS", "Arguments of the script.")]


# The module's name is the first argument and no value of -m: so all that follows it is the module's, --help too.
@command(
    rank=10,
    usual="--device-profile --scheme --batch-size --module --gpus --max-batch --whole --require-fit --meter "
    "--export-json",
    context_settings={"allow_interspersed_args": False},
)
@expanded
def run_script(
    *,
    context: Context,
    target: Target,
    arguments: Arguments = None,
    module: Annotated[bool, option("--module -m", "The script is a module, as of python -m.", only_typed=True)] = False,
    scheme: SchemeOption = None,
    batch_size: Annotated[
        int | None,
        count_option("--batch-size -b", "Rows of a batch, instead of the script's own number."),
    ] = None,
    meter: Annotated[
        Literal["simulated", "cpu", "cuda"],
        option("--meter", "simulated: on fake tensors, on any machine; cpu or cuda: for real, on this one."),
    ] = "simulated",
    device: DeviceFlags,
    gpus: Annotated[
        int,
        count_option(
            "--gpus",
            "Simulate rank 0 of N processes, each with a card, as torchrun and accelerate start them.",
            most=MOST_PROCESSES,
        ),
    ] = 1,
    steps: Annotated[
        int | None,
        count_option("--steps", "Run so many steps of the optimizer (default: until two in a row are equal)."),
    ] = None,
    whole: Annotated[
        bool,
        option(
            "--whole",
            "Go on to the end of the script: its largest batch, evaluations, generation and saves, each with what it "
            "needs. Epochs are cut short.",
        ),
    ] = False,
    full_answer: Annotated[
        bool,
        option(
            "--full-answer",
            "Find what the best remedy needs, and the largest batch, where that takes more than 20 s, too: up to "
            "--timeout.",
        ),
    ] = False,
    raise_oom: Annotated[
        bool,
        option(
            "--raise-oom",
            "Raise torch.OutOfMemoryError where the card would run out of memory, for scripts that try again with a "
            "smaller batch.",
        ),
    ] = False,
    curve: CurveFlags,
    timeout: TimeoutOption = 600.0,
    progress: LiveFlags,
    force: Annotated[
        bool, option("--force", "Run again the cases that the results file already holds.", only_typed=True)
    ] = False,
    retry_failed: Annotated[
        bool, option("--retry-failed", "Run again the cases that failed in the results file.")
    ] = False,
    require_fit: RequireFitOption = False,
    output: OutputOption = None,
    exports: ResultFlags,
) -> None:
    """Run a training script, unchanged, on a card that need not be there: does it fit, and what holds the memory?

    The script runs on fake tensors, in a separate process, until two steps of its optimizer are equal. Its data is
    loaded for real, no weight is computed, and it ends before it saves anything, or with --whole at its own end.
    The output ends with whether a step fits, the best remedy to paste with what it needs, and the largest batch that
    fits: the script runs a few more times for these, as far as each takes no more than some 20 s; --full-answer waits
    for all. --verbose adds the peak by phase, kind, line of the script and module, the estimated time, and all schemes
    worth trying. Each --scheme adds a row to compare with the unchanged script.
    --quiet also hides what the script prints.

    Options come before the script; everything after it belongs to the script. Its code runs as python would run it:
    run no script that you do not trust.

    Exit status: 0 all measured, 1 the script or a scheme failed (with --require-fit: or is expected to run out of
    memory), 2 wrong usage.

    Examples:

    actbench run --device-profile rtx-4090 train.py --lr 3e-4

    actbench run --device-profile rtx-4090 -s checkpoint -s adam8bit train.py

    actbench run --device-profile h100-80gb --gpus 8 -m trl.scripts.sft --config sft.yaml

    actbench run --device-profile rtx-3060-12gb --max-batch --columns largest-batch,peak train.py

    actbench run --batch-size 4 --require-fit --export-json peak.json --quiet train.py

    actbench run --device-profile rtx-4090 --whole train.py --epochs 3

    actbench run --live train.py --epochs 3

    actbench run --meter cpu --steps 3 train.py
    """
    script = Script(
        target=target,
        is_module=module,
        arguments=tuple(_writable(arguments or [])),
        batch_size=batch_size,
        steps=steps,
        processes=gpus,
        raise_oom=raise_oom,
        whole=whole,
    )
    case = _case(script, meter, device)
    specs = checked_schemes(scheme or [], "--scheme")
    columns = exports.chosen
    if full_answer and (specs or columns or meter != "simulated"):
        raise UsageError(
            "--full-answer: a script that is simulated by itself has an answer; leave out --scheme, --columns, --meter"
        )
    curve.check()
    check_script(script)
    own = {name: not getattr(each, "is_flag", False) for each in context.command.params for name in each.opts}
    if behind := misplaced(script, own):
        names = list(dict.fromkeys(script.arguments[place].partition("=")[0] for place in behind))
        remark(
            f"actbench: {' and '.join(names)} after {target} {'goes' if len(names) == 1 else 'go'} to the script; "
            f"options of actbench stand before it: {with_options(sys.argv[1:], script, (), behind)}"
        )

    from actbench.run.processes import ForkServer
    from actbench.run.stored import stored_results

    kept = "; rows that were finished are stored, and the same command goes on from there" if output else ""
    out = readers(exports)
    with schemes_from("--scheme"), progress_shown(kept, progress, as_lines=True) as told, ExitStack() as held:
        settled: Any = {"retry_failed": retry_failed, "progress": told}
        named, found = name_and_title(case, specs), partial(written, case, specs)
        force = force or full_answer  # what is stored may have been cut short
        comparison = None if force else stored_results(*named, found, output, **settled)
        if comparison is None:
            # its imports and those of this process take seconds each: they go on side by side
            bench = BENCH if specs or exports.columns else FULLY_ANSWERED if full_answer else FOLLOWED_UP
            server = held.enter_context(ForkServer(bench))
            from actbench.tools.script import experiment as scripts  # which imports torch

            comparison = scripts.run(
                case,
                specs,
                output,
                command=command_line(),
                timeout_seconds=timeout,
                force=force,
                printed=None if progress.quiet else (told.stream(out), told.stream(sys.stderr)),
                server=server,
                bench=bench,
                **settled,
            )
    asked = {"largest-batch": device.max_batch, "over-limit": device.memory_limit is not None or require_fit}
    answering = tuple(name for name, is_asked in asked.items() if is_asked)
    _show(
        comparison.records,
        columns,
        answering,
        curve,
        exports,
        is_quiet=progress.quiet,
        is_verbose=progress.verbose,
        is_assumed=device.device_profile is None,
    )
    finish(comparison, (), beside=exports, require_fit=require_fit)


def _writable(arguments: Sequence[str]) -> Sequence[str]:
    for text in arguments:
        if encodable(text) != text:
            raise UsageError(f"the argument {encodable(text)!r} is not UTF-8, which results are written in; change it")
    return arguments


def _case(script: Script, meter: Literal["simulated", "cpu", "cuda"], device: DeviceFlags) -> Case:
    """Return the case of the unchanged script; a UsageError if flags do not go together."""
    if meter != "simulated" and script.processes > 1:
        raise UsageError(f"--gpus {script.processes} cards are simulated, and --meter {meter} measures: leave one out")
    if meter != "simulated" and device.device_profile is not None:
        raise UsageError(
            f"--device-profile {device.device_profile} is simulated, and --meter {meter} measures this machine: leave "
            "one out"
        )
    if script.whole and meter == "cuda":
        raise UsageError("--whole: a run on a GPU is measured step by step; simulate it, or measure it by --meter cpu")
    if script.whole and device.max_batch:
        raise UsageError("--whole and --max-batch: the largest batch is searched in steps; leave one out")
    try:
        limit = None if device.memory_limit is None else parse_bytes(device.memory_limit)
    except UsageError as error:
        raise UsageError(f"--memory-limit: {error}") from None
    return Case(
        model=script.text,
        batch_size=script.batch_size or 1,
        meter=meter,
        device_profile=device.device_profile,
        memory_limit_bytes=limit,
        find_largest_batch=device.max_batch,
        gradient_quality=False,
        script=script,
    )


def _show(
    records: Sequence[MeasuredRecord],
    columns: tuple[str, ...],
    asked: tuple[str, ...],
    curve: CurveFlags,
    exports: ResultFlags,
    *,
    is_quiet: bool,
    is_verbose: bool,
    is_assumed: bool,
) -> None:
    """Print what came of a script, and write the files.

    ``asked`` are the columns that other flags ask for, beside those of --columns, if any. ``is_assumed`` says that
    the card was not named. With --quiet it is left out.
    """
    from actbench.report.advice import about_limits
    from actbench.report.render.formats import json_lines
    from actbench.report.render.screen import NOTE_LINES, in_lines
    from actbench.report.tables import report_tables
    from actbench.tools.script.answers.answer import answer, judged
    from actbench.tools.script.answers.bar import peak_bar
    from actbench.tools.script.answers.tables import script_tables
    from actbench.tools.script.answers.verdict import about_card, about_values, in_short, verdict

    unchanged, compares = records[0], len(records) > 1 or bool(columns)
    of_script = list(script_tables(unchanged.outcome))
    title = f"What does each scheme save on {unchanged.case.shown_model}?"
    names = tuple(dict.fromkeys([*columns, *asked]))
    shown = report_tables(records, title, names if columns else (), never_hidden=names)
    export(
        exports,
        (*shown[:1], *of_script, *tables_of(records)),
        lambda: json_lines(records),
        title=unchanged.case.model,
        records=records,
    )
    printed, script = console(readers(exports)), unchanged.case.script
    assert script is not None
    command = partial(_with_options, script)
    if is_assumed and unchanged.case.meter == "simulated":
        _say([about_card(unchanged)], exports)
    if is_verbose:
        show(*of_script, beside=exports)
    elif script.whole:
        show(*of_script[:1], beside=exports)
    if isinstance(unchanged.outcome, Measurement) and not compares:
        for line in peak_bar(unchanged.outcome, printed.width, coloured=printed.color_system is not None):
            printed.print(line)
    if compares:
        show(*shown, beside=exports, all_notes=is_verbose)
    more = verdict(unchanged)[len(in_short(unchanged)) :]
    told = [] if is_quiet else about_values(unchanged)
    if not compares:
        told = [*shown[0].notes, *told]
        told = [note for note in told if note not in about_limits(records)]  # the verdict says more
    notes = in_lines([*more, *told], printed.width, None if is_verbose else NOTE_LINES, shown[0].details)
    _say(notes, exports)
    if is_verbose and not compares:
        _say(_worth_trying(unchanged, command), exports)
    if curve.timeline:
        show_timelines(records, exports)
    export_timelines(records, curve)
    _say(judged(unchanged) if compares else answer(unchanged, command), exports)


def _with_options(script: Script, *options: str) -> str:
    return with_options(sys.argv[1:], script, options)


def _worth_trying(record: MeasuredRecord, command: Callable[..., str]) -> list[str]:
    from actbench.tools.fit.codegen import lines_for
    from actbench.tools.script.answers.answer import planning
    from actbench.tools.script.answers.suggestions import free_remedies, suggestions

    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    free, found = free_remedies(measured), suggestions(measured)
    lines = ["", "Free of cost:", *(f"  {each}" for each in free)] if free else []
    if not found:
        return lines
    lines += ["", f"Worth trying; to see what each saves and costs: {command('--scheme', 'NAME')}"]
    for each in found:
        lines.append(f"  {each.scheme}: {each.reason}")
        lines += [f"    {line}" for line in lines_for(each.scheme, measured.optimizer)]
    return [*lines, *planning(record.case, measured), ""]


def _say(lines: Sequence[str], exports: ResultFlags) -> None:
    printed = console(readers(exports))
    for line in lines:
        printed.print(plain(line), markup=False, soft_wrap=True)
