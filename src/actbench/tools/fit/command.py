"""The verb fit: how a model fits on a card, what it costs, and the code to paste."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, get_args

from actbench.cli.app import Exit, command, count_option, one_of, option, seconds_option
from actbench.cli.clusters import ClusterFlags
from actbench.cli.flags import ModelArgument, OutputOption, StepFlags, TimeoutOption, expanded
from actbench.cli.givenschemes import checked_schemes, schemes_from
from actbench.cli.printing import ExportFlags, command_line, export, progress_shown, readers, remark, show
from actbench.errors import UsageError
from actbench.model.declared import check_device_profile, check_model
from actbench.model.records import Case, Optimizer
from actbench.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from actbench.tools.fit.fit import Fit
    from actbench.tools.fit.records import Asked, Tried


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
            "Choose only from these schemes, such as checkpoint, adam8bit or gact:L2. Repeat for more.",
            metavar="SPEC",
            show_default=False,
        ),
    ] = None,
    max_slowdown: Annotated[
        float,
        option("--max-slowdown", "Most that a stack may take, in multiples of the exact step's estimate.", min=1.0),
    ] = 2.0,
    exact: Annotated[
        bool, option("--exact", "Only stacks with the exact step's gradients, updates and precision, to rounding.")
    ] = False,
    measure: Annotated[
        bool,
        option("--measure", "Measure the first three on this machine's device, and show the errors of the estimates."),
    ] = False,
    show_code: Annotated[
        int, count_option("--code", "Print the code of the first N stacks.", least=0, metavar="N")
    ] = 1,
    jobs: Annotated[
        int | None,
        count_option(
            "--jobs -j",
            "Promising stacks that are simulated at a time before the next are chosen (default: one a core here).",
        ),
    ] = None,
    budget: Annotated[
        float, seconds_option("--budget", "Seconds, once all is loaded, after which nothing new is simulated.", least=1)
    ] = 120.0,
    timeout: TimeoutOption = 1800.0,
    nodes: ClusterFlags,
    output: OutputOption = Path("results/fit"),
    exports: ExportFlags,
) -> None:
    """Find how a training step fits on a card: which schemes together, what they cost, and the code to paste.

    Stacks of schemes are simulated for the card, first those that can lower what fills its memory. The table lists
    stacks that fit, the fastest first: the estimated time beside the exact step's, how the gradient changes, and what
    else changes. Stacks that train adapters instead of the model's parameters have their own table. Run the same
    command again to continue a stopped fit. On a machine with the card, --measure runs the first three stacks and
    shows the errors of the estimates.

    Exit status: 0 something fits within --max-slowdown, with adapters or without, 1 nothing does, 2 wrong usage.

    Examples:

    actbench fit llama-3.1-8b --device-profile rtx-4090 --sequence-length 2048 --dtype bfloat16 --batch-size 1

    actbench fit roberta-base --device-profile rtx-4060 --batch-size 128 --exact

    actbench fit resnet50 --device-profile v100-16gb --batch-size 256 --max-slowdown 1.5 --export-markdown fit.md

    actbench fit qwen3-0.6b --device-profile rtx-4090 --batch-size 8 --sequence-length 4096 --measure

    actbench fit train.py:build --device-profile rtx-3090 --memory-limit 20GiB --budget 600

    actbench fit llama-3.1-8b --device-profile h100-80gb --batch-size 4 --cluster ray://head:10001
    """
    machines = nodes.chosen
    case, asked = _asked(model, flags, max_slowdown, exact)
    checked_schemes(among or [], "--scheme")

    from actbench.report.render.formats import json_lines
    from actbench.tools.fit.fit import fit as find
    from actbench.tools.fit.tables import FIT_TITLE, tables_of

    with schemes_from("--scheme"):
        schemes = _alone(among)
    with progress_shown("; what was simulated is stored, and the same command goes on from there") as progress:
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
    tables = tables_of(found.found, FIT_TITLE)
    show(*tables, beside=exports)
    export(exports, tables, lambda: json_lines(found.records))
    chosen = [each for adapters in (False, True) for each in found.found.shortlist(adapters=adapters)[:show_code]]
    _print_code(chosen, readers(exports))
    _remarks(found)
    if not found.is_possible:
        raise Exit(1)


def _asked(model: str, flags: FitFlags, max_slowdown: float, exact: bool) -> tuple[Case, Asked]:
    from actbench.tools.fit.records import Asked

    if flags.device_profile is None:
        raise UsageError(
            "--device-profile: name the card that the step is to fit on, as rtx-4090; 'actbench devices' lists them"
        )
    check_device_profile(flags.device_profile)
    check_model(model)
    given = flags.given(set(Case.model_fields) - {"optimizer"})
    chosen = flags.optimizer or []
    optimizer, others = (chosen[0], chosen[1:]) if chosen else (None, [])
    limit = {} if flags.memory_limit is None else {"memory_limit_bytes": parse_bytes(flags.memory_limit)}
    case = Case(**{**given, **limit, "model": model, "optimizer": optimizer})
    return case, Asked(max_slowdown=max_slowdown, exact=exact, optimizer=optimizer, others=tuple(others))


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
        raise UsageError(f"--scheme {stack}: fit stacks schemes itself; name them one by one, each with --scheme")
    return list(dict.fromkeys(scheme.spec for scheme in built.values() if scheme.spec != "exact"))


def _print_code(chosen: list[Tried], to: TextIO) -> None:
    from actbench.tools.fit.code import code_for

    for tried in chosen:
        case = tried.record.case
        code = code_for(case, tried.measured)
        print(f"\n# {case.scheme}, a loop of your own\n{code.loop}", file=to)
        if code.trainer:
            print(f"# {case.scheme}, with transformers' Trainer\n{code.trainer}", file=to)
        else:
            print(f"# not with transformers' Trainer: {code.why_no_trainer}\n", file=to)
        print(f"# measured on the device\n{code.command}", file=to)


def _remarks(found: Fit) -> None:
    known = sum(record.case.meter == "simulated" for record in found.records) - found.simulated
    explored = f"; {found.explored} more explored on two copies of the model with few blocks" if found.explored else ""
    remark(f"{found.simulated} stacks simulated, {known} taken from the results file{explored}")
    if found.path is not None:
        remark(f"results: {found.path} (tables beside it, as .md and .csv)")
    for why in found.refused:
        remark(f"not for this model: {why}")
    for why in found.kept:
        remark(why)
    if found.untried:
        remark(
            f"the time of --budget ended before these were simulated: {', '.join(found.untried[:10])}"
            f"{' and others' if len(found.untried) > 10 else ''}; the same command goes on from there"
        )
    if not found.is_possible:
        remark(_impossible(found))


def _impossible(found: Fit) -> str:
    """Return the message for a fit without a result: the least need, and what to change."""
    fitted = found.found
    limit = fitted.exact.measured.memory_limit_bytes or 0
    fits = [each for each in fitted.tried if each.measured.fits]
    if fits:
        fastest = fits[0]
        return (
            f"nothing fits within --max-slowdown {fitted.max_slowdown:g}; {fastest.record.case.scheme} fits and takes "
            f"{fastest.slowdown:.3g} times the exact step's time{'; ' if found.untried else ''}{_more_time(found)}"
        )
    if found.may_fit:
        return (
            f"the time of --budget ended before {found.untried[0]} was simulated whole, which fits as far as copies of "
            "the model with few blocks tell: give a larger --budget"
        )
    least = min(fitted.tried, key=lambda each: each.need_bytes)
    remedies = [_more_time(found)] if found.untried else []
    if not found.unreached:
        remedies += [_smaller(least, limit)]
        remedies += [f"--device-profile {found.least_profile}"] if found.least_profile else []
        remedies += ["a larger --memory-limit"] if found.has_more else []
        remedies += ["leave out --exact"] if least.record.asked.exact else []
    return (
        f"nothing that was tried fits in {format_bytes(limit)}: the least, {least.record.case.scheme}, needs "
        f"{format_bytes(least.need_bytes)}; {', or '.join(remedies)}"
    )


def _more_time(found: Fit) -> str:
    """Return what time ended before, and that there may be more of it; empty if nothing was left untried."""
    if not found.untried:
        return ""
    *most, last = found.unreached or (f"{len(found.untried)} more stacks",)
    what = f"{', '.join(most)} and {last}" if most else last
    return f"the time of --budget ended before {what} could be tried: give a larger --budget"


def _smaller(least: Tried, limit: int) -> str:
    """Return what to make smaller: the model, if it fills the memory by itself, or else the batch."""
    parts = least.measured.peak_parts
    of_model = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes if parts else 0
    if of_model <= limit:
        return "take a smaller --batch-size or shorter samples"
    return (
        f"weights, gradients and optimizer state alone are {format_bytes(of_model)} of it: take a smaller model or type"
    )
