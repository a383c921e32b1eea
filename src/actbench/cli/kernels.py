from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from actbench.cli.app import app, option, seconds_option
from actbench.cli.flags import OutputOption, expanded
from actbench.cli.outputs import ExportFlags
from actbench.cli.printing import command_line, export, remark, show
from actbench.paths import check_makeable

if TYPE_CHECKING:
    from actbench.results.kernels import KernelReport
    from actbench.results.tables import Table

DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    option("--device", "What computes. Default: cuda with a GPU, otherwise cpu.", show_default=False),
]
OpOption = Annotated[
    list[str] | None,
    option("--op", "Operator, repeated or separated by commas; 'layer' is all layers. Default: all.", metavar="NAME"),
]
SizeOption = Annotated[
    list[str] | None,
    option("--size", "Rows and columns, such as 512x3072; repeat or separate by commas.", metavar="RxC"),
]
TypesOption = Annotated[
    list[str] | None,
    option("--dtype", "float32, bfloat16 or float16 (fp32, bf16, fp16); repeat or separate by commas.", metavar="TYPE"),
]
BitsOption = Annotated[
    list[str] | None, option("--bits", "1 to 8; repeat or separate by commas (default 3).", metavar="BITS")
]
SpentOption = Annotated[float, seconds_option("--seconds", "Seconds of interleaved runs of each row.")]
CompileOption = Annotated[
    bool | None,
    option("--compile/--no-compile", "Also torch.compile of the exact layers (default: on CUDA).", show_default=False),
]


@app.command()
@expanded
def kernels(
    *,
    device: DeviceOption = None,
    op: OpOption = None,
    size: SizeOption = None,
    dtype: TypesOption = None,
    bits: BitsOption = None,
    seconds: SpentOption = 1.0,
    compiled: CompileOption = None,
    output: OutputOption = None,
    exports: ExportFlags,
) -> None:
    """Measure the operators: time, bytes a second, and both beside a copy and beside the exact operator.

    --output writes MACHINE.json and MACHINE.md into a folder.

    Examples:

    actbench kernels

    actbench kernels --op layer --bits 2,3,4 --size 4096x3072

    actbench kernels --device cuda --dtype bfloat16 --output results/kernels
    """
    from actbench.measuring.kernels import choices
    from actbench.results.machine import find_gpu

    where = device or ("cuda" if find_gpu() else "cpu")
    plan = choices.Plan(
        device=where,
        operators=choices.operators(op or ()),
        sizes=choices.sizes(size or choices.DEFAULT_SIZES[where]),
        dtypes=choices.dtypes(dtype or choices.DEFAULT_DTYPES[where]),
        bits=choices.bits(bits or ("3",)),
        seconds=seconds,
        compiled=where == "cuda" if compiled is None else compiled,
    )
    if output is not None:
        check_makeable(output)
    from actbench.measuring.kernels.measure import run
    from actbench.results.kernels import report_table

    report = run(plan, command_line(), remark)
    table = report_table(report)
    text = report.model_dump_json(indent=2) + "\n"
    export(exports, [table], lambda: text)
    if output is not None:
        _write(report, table, text, output)
    show(table, beside=exports)


def _write(report: KernelReport, table: Table, text: str, output: Path) -> None:
    """Write the report and its table into a folder, or to a .json file and beside it."""
    folder, stem = (output.parent, output.stem) if output.suffix == ".json" else (output, _name(report))
    written = ExportFlags(export_markdown=folder / f"{stem}.md", export_json=folder / f"{stem}.json")
    export(written, [table], lambda: text)
    remark(f"results: {folder / stem}.json (its table beside it, as .md)")


def _name(report: KernelReport) -> str:
    """Return the machine's name, which that of a GPU must not be for a report of its processor."""
    on_cpu = report.machine.gpu is not None and all(result.device == "cpu" for result in report.results)
    return f"{report.machine.name}-cpu" if on_cpu else report.machine.name
