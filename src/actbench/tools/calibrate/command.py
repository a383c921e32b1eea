"""The verb calibrate: how fast this machine is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from actbench.cli.app import command, option, path_named, seconds_option
from actbench.cli.flags import expanded
from actbench.cli.printing import ExportFlags, ProgressFlags, export, progress_shown, remark, show
from actbench.errors import StoreError, UsageError
from actbench.machine import find_gpu, machine

DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    option("--device", "cpu or cuda. Default: cuda with a GPU, otherwise cpu.", show_default=False),
]


@command(rank=90)
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
    force: Annotated[bool, option("--force", "Replace an existing file.", only_typed=True)] = False,
    budget: Annotated[
        float, seconds_option("--budget", "Seconds after which no new measurement starts.", least=1)
    ] = 100.0,
    progress: ProgressFlags,
    exports: ExportFlags,
) -> None:
    """Measure the speed of this machine, and write a device profile that estimates step times for it.

    The operators of training steps are timed one by one: of several models and of every scheme, at several sizes, in
    float32 and bfloat16. Give the file to --device-profile of other verbs. Run nothing else meanwhile. The first run
    also compiles kernels, which takes a minute more.

    Examples:

    actbench calibrate

    actbench calibrate --device cpu -o here.toml

    actbench measure resnet50 -s checkpoint -b 8 --meter simulated --device-profile here.toml
    """
    from actbench.report.render import exports as files

    where = device or ("cuda" if find_gpu() else "cpu")
    path = output or Path(machine().name + ("-cpu" if where == "cpu" and find_gpu() else "") + ".toml")
    if path.suffix != ".toml":
        raise UsageError(
            f"--output {str(path)!r}: a device profile is a .toml file; name one, such as {path.name}.toml"
        )
    files.check_writable(path)
    if path.exists() and not force:
        raise StoreError(f"{path} exists already: --force replaces it, --output names another file")
    from actbench.tools.calibrate.calibrate import calibrate as measure
    from actbench.tools.calibrate.profile import calibration_table, toml

    with progress_shown("; nothing was written", progress, as_lines=True) as told:
        found = measure(where, budget_seconds=budget, progress=told.doing)
    table = calibration_table(*found)
    files.export({path: toml(found.profile)})
    export(exports, [table], lambda: found.profile.model_dump_json(indent=2, exclude_none=True) + "\n")
    show(table, beside=exports)
    remark(f"device profile: {path}; use it with --device-profile {path}")
