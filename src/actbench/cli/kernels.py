"""The verbs kernels and calibrate: how fast this machine is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from actbench.cli.app import command, option, path_named, seconds_option
from actbench.cli.flags import OutputOption, expanded
from actbench.cli.printing import ExportFlags, command_line, export, finish, progress_shown, remark, show
from actbench.errors import StoreError, UsageError
from actbench.results.machine import find_gpu, machine

DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    option("--device", "cpu or cuda. Default: cuda with a GPU, otherwise cpu.", show_default=False),
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
    option("--compile/--no-compile", "Also exact layers under torch.compile (default: on CUDA).", show_default=False),
]


@command()
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
    force: Annotated[bool, option("--force", "Measure again what the results file already holds.")] = False,
    output: OutputOption = None,
    exports: ExportFlags,
) -> None:
    """Measure the operators: time and bytes a second, compared with a copy and with the exact operator.

    With --output each row is stored as soon as it is measured, in OUTPUT/kernels/MACHINE.kernels.jsonl, with the tables
    beside it. Run the same command again to continue where it stopped. Stored rows stay, whatever --seconds says;
    --force measures them again. Exit status as for sweep.

    Examples:

    actbench kernels

    actbench kernels --op layer --bits 2,3,4 --size 4096x3072

    actbench kernels --device cuda --dtype bfloat16 --output results
    """
    from actbench.measuring.kernels import choices

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
    from actbench.experiments import kernels as experiment
    from actbench.results.kernels import TITLE, kernel_tables
    from actbench.results.render.formats import json_lines

    kept = "; what was measured is stored, and the same command goes on from there" if output else ""
    with progress_shown(kept) as progress:
        found = experiment.run(plan, output, command=command_line(), force=force, progress=progress)
    tables = kernel_tables(found.records, TITLE)
    export(exports, tables, lambda: json_lines(found.records))
    finish(found, tables, beside=exports)


@command()
@expanded
def calibrate(
    *,
    device: DeviceOption = None,
    output: Annotated[
        Path | None,
        option(
            "--output -o",
            "The device profile to write (default MACHINE.toml in this folder).",
            metavar="FILE.toml",
            parser=path_named,
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, option("--force", "Replace a file that is there.")] = False,
    budget: Annotated[
        float, seconds_option("--budget", "Seconds after which nothing new is measured.", least=1)
    ] = 100.0,
    exports: ExportFlags,
) -> None:
    """Measure the speed of this machine, and write a device profile that estimates step times for it.

    Matrix products, convolutions, attention, elementwise operators, reductions, copies and the operators of every
    scheme are timed one by one, at several sizes, in float32 and bfloat16. Give the file to --device-profile of other
    verbs. Let nothing else run meanwhile. The first run also compiles kernels, which takes a minute more.

    Examples:

    actbench calibrate

    actbench calibrate --device cpu -o here.toml

    actbench measure resnet50 -s checkpoint -b 8 --meter simulated --device-profile here.toml
    """
    from actbench.results.calibration import calibration_table
    from actbench.results.render import exports as files

    where = device or ("cuda" if find_gpu() else "cpu")
    path = output or Path(machine().name + ("-cpu" if where == "cpu" and find_gpu() else "") + ".toml")
    if path.suffix != ".toml":
        raise UsageError(
            f"--output {str(path)!r}: a device profile is a .toml file; name one, such as {path.name}.toml"
        )
    files.check(path)
    if path.exists() and not force:
        raise StoreError(f"{path} exists already: --force replaces it, --output names another file")
    from actbench.measuring.calibration import calibrate as measure
    from actbench.measuring.calibration.profile import toml

    found = measure(where, budget_seconds=budget, command=command_line(), progress=remark)
    table = calibration_table(found.report)
    files.export({path: toml(found.profile)})
    export(exports, [table], lambda: found.report.model_dump_json(indent=2) + "\n")
    show(table, beside=exports)
    remark(f"device profile: {path}; use it with --device-profile {path}")
