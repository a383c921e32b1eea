from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TextIO

from actbench.cli.app import command, count_option, option, seconds_option
from actbench.cli.flags import ModelArgument, ModelFlags, OutputOption, expanded
from actbench.cli.printing import ExportFlags, ProgressFlags, call_task, export, readers, remark, show
from actbench.cli.schemeargs import schemes_from
from actbench.errors import UsageError
from actbench.model.declared import check_model
from actbench.model.records import Case
from actbench.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from actbench.tools.convert.report import ConversionReport


@command(
    rank=50,
    usual="--scheme --gelu-bits --linear --batch-size --sequence-length --task --weights --dry-run --output "
    "--export-json",
)
@expanded
def convert(
    *,
    model: ModelArgument,
    flags: ModelFlags,
    output: OutputOption = None,
    dry_run: Annotated[bool, option("--dry-run", "Show what would be converted and write nothing.")] = False,
    probe: Annotated[
        bool,
        option("--probe", "Compare the gradient of one batch with the exact model's, on this machine's CPU."),
    ] = False,
    force: Annotated[
        bool, option("--force", "Replace a folder that holds a converted model.", only_typed=True)
    ] = False,
    batch_size: Annotated[int, count_option("--batch-size -b", "Batch size for which bytes are shown.")] = 8,
    timeout: Annotated[
        float, seconds_option("--timeout", "Seconds after which the conversion, with downloads, is stopped.", least=1)
    ] = 1800.0,
    memory_limit: Annotated[
        str | None, option("--memory-limit", "Memory that the conversion may use (default: all that is free).")
    ] = None,
    progress: ProgressFlags,
    exports: ExportFlags,
) -> None:
    """Convert a model: show each place that changes with the bytes it saves before and after, and write the folder.

    The folder holds the files of save_pretrained, so a plain from_pretrained still loads the unconverted model, and
    actbench.json, with which actbench.load_converted loads the converted one. The conversion runs in a separate
    process.

    A warning names a scheme whose gradient is far from the exact one on this model, by the records of an earlier
    measure or sweep in the folder results, or by --probe.

    Examples:

    actbench convert roberta-base --gelu-bits 3 --linear randomized:0.2

    actbench convert resnet50 --scheme checkpoint --dry-run

    actbench convert roberta-base --scheme actnn:L3 --dry-run --probe --batch-size 2

    actbench convert ./my-model --scheme fewbit:2+randomized:0.1 --output my-model-small
    """
    from pydantic import TypeAdapter

    from actbench.run.executor import PRELOAD
    from actbench.run.tasks import Tasks
    from actbench.tools.convert.report import ConversionReport, ConversionRequest, sites_table, unreached_table

    if len(flags.schemes) != 1:
        raise UsageError("convert takes one scheme: give --scheme SPEC (joined by +), or --gelu-bits and --linear")
    check_model(model)
    memory_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    settings = {"weights": "auto", **flags.given(Case.model_fields), "scheme": flags.schemes[0]}
    case = Case(model=model, batch_size=batch_size, **settings)
    request = TypeAdapter(ConversionRequest).dump_json(ConversionRequest(case, output, dry_run, force, probe)).decode()
    with schemes_from(flags.scheme_flags), Tasks("actbench.tools.convert.workload", PRELOAD) as tasks:
        doing = f"converting {model!r}"
        answer = call_task(
            tasks,
            "convert",
            request,
            doing=doing,
            timeout_seconds=timeout,
            memory_bytes=memory_bytes,
            flags=progress,
        )
    report = TypeAdapter(ConversionReport).validate_json(answer)
    title = f"{model} with {report.case.scheme}, batch {batch_size}"
    saved = report.bytes_before - report.bytes_after
    show(sites_table(report.sites, title, saved, fold=True), beside=exports)
    if report.unreached:
        show(unreached_table(report.unreached), beside=exports)
    _print_totals(report, readers(exports))
    _tell_error(report)
    export(exports, [sites_table(report.sites, title, saved)], lambda: _as_json(report))


def _print_totals(report: ConversionReport, to: TextIO) -> None:
    before, after = report.bytes_before, report.bytes_after
    times = f"{before / after:.2f} times smaller" if before >= after else f"{after / before:.2f} times larger"
    length = f" of {report.built.sequence_length} tokens" if report.built and report.built.sequence_length else ""
    print(
        f"The whole model keeps {format_bytes(before)} for backward before, {format_bytes(after)} after "
        f"({times}), at batch {report.case.batch_size}{length}.",
        file=to,
    )
    for warning in report.warnings:
        remark(f"warning: {warning}")
    remark(_what_was_done(report))


def _what_was_done(report: ConversionReport) -> str:
    """Return one sentence: what was built, where it was written, how large it is there, and how to load it."""
    built = "" if report.built is None else f"built {report.built.model_class} for {report.built.task}; "
    if report.folder is None:
        return f"{built}nothing was written (--dry-run)"
    own = ", model=..." if ".py:" in report.case.model else ""
    size = format_bytes(sum(file.stat().st_size for file in report.folder.rglob("*") if file.is_file()))
    return (
        f"{built}written to {report.folder} ({size}) in {format_seconds(report.seconds)}; "
        f"load it with actbench.load_converted({str(report.folder)!r}{own})"
    )


def _tell_error(report: ConversionReport) -> None:
    """Remark the gradient error that was measured, or warn of one that records have."""
    from actbench.tools.convert.gradienterrors import Known, recorded, warning

    case, error = report.case, report.gradient_error
    known = recorded(case.model, case.scheme)
    if error is not None:
        known = Known(error, f"one batch of {case.batch_size} on this machine's CPU")
    if text := warning(case.scheme, case.model, known):
        remark(f"warning: {text}")
    elif error is not None:
        remark(f"relative error of the gradient: {error:.2g}, of one batch of {case.batch_size}; 0 is exact")


def _as_json(report: ConversionReport) -> str:
    from pydantic_core import to_json

    return to_json(
        {
            "case": report.case.model_dump(),
            "sites": [site.model_dump() for site in report.sites],
            "unreached": [place.model_dump() for place in report.unreached],
            "activation_bytes_before": report.bytes_before,
            "activation_bytes_after": report.bytes_after,
            "weights_origin": report.weights_origin,
            "built": report.built.model_dump() if report.built else None,
            "gradient_error": report.gradient_error,
        },
        indent=2,
        inf_nan_mode="strings",
    ).decode()
