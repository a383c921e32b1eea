"""``actbench doctor``: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from actbench import plugins
from actbench.caches import user_cache
from actbench.cli import clusters, defaults, launcher
from actbench.cli.app import Exit, Typer, command
from actbench.cli.extras import extras
from actbench.cli.printing import console, plain_table
from actbench.machine import available_memory_bytes, machine, version_of
from actbench.units import counted, format_bytes

Verdict = Literal["ok", "optional", "missing"]


@dataclass(frozen=True)
class Check:
    """One finding; ``missing`` means that actbench cannot do its main job without it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Check Python, libraries, devices, memory, disk, extras, the defaults of options, and plug-ins."""
    libraries = map(_library, ("torch", "torchvision", "transformers", "safetensors", "pandas"))
    here = (_cuda(), _numba(), _processor(), _memory(), _disk())
    return [_python(), *libraries, *here, *_extras(), *_defaults(), *_plugins()]


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check(
        "Python", "ok" if good else "missing", platform.python_version(), "" if good else "install Python 3.11"
    )


def _library(name: str) -> Check:
    version = version_of(name)
    return Check(name, "ok", version) if version else Check(name, "missing", "not installed", f"pip install {name}")


def _cuda() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("CUDA", "missing", f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = f"{properties.name}, {format_bytes(properties.total_memory)}, CUDA {torch.version.cuda}"
        return Check("CUDA", "ok", found)
    if torch.version.cuda is None:
        return Check("CUDA", "optional", "this build of torch is for the CPU", "pip install --force-reinstall torch")
    advice = "install the NVIDIA driver; the simulated and cpu meters work without one"
    return Check("CUDA", "optional", f"torch is built for CUDA {torch.version.cuda}, but no GPU answers", advice)


def _numba() -> Check:
    version = version_of("numba")
    if version is None:
        return Check("Numba", "missing", "not installed", "pip install numba")
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return Check("Numba", "missing", f"{version}, without OpenMP", "install libgomp (Debian: apt install libgomp1)")
    return Check("Numba", "ok", f"{version}, with OpenMP")


def _extras() -> Iterator[Check]:
    """Yield what each extra is for, with the versions of its packages, or the command that installs it."""
    named = list(extras())
    if all(extra.package != plugins.OURS for extra in named):  # as repacked, or from an old build
        yield Check("Extras", "optional", "what is installed of actbench names none", "install actbench again, by pip")
    for extra in named:
        found = ", ".join(f"{name} {version or 'is not installed'}" for name, version in extra.versions.items())
        verdict: Verdict = "ok" if extra.is_installed else "optional"
        advice = "" if extra.is_installed else f'pip install "{extra.requirement}"'
        of = extra.name if extra.package == plugins.OURS else extra.requirement
        yield Check(f"Extra: {of}", verdict, f"{found} ({extra.purpose})", advice)


def _processor() -> Check:
    here = machine()
    return Check("Processor", "ok", f"{here.processor}, {counted(here.cores, 'core')}, {platform.machine()}")


def _memory() -> Check:
    free, total = available_memory_bytes(), machine().memory_bytes
    return Check("Memory", "ok", f"{format_bytes(free)} free of {format_bytes(total)}")


def _disk() -> Check:
    folder = user_cache()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        advice = "set XDG_CACHE_HOME to a folder that can be written; kernels are compiled again in each run until then"
        return Check("Cache folder", "optional", f"{folder} cannot be written", advice)
    return Check("Cache folder", "ok", f"{folder}, {format_bytes(shutil.disk_usage(there).free)} free")


def _defaults() -> Iterator[Check]:
    """Yield each default of an option, with the place where it is written, and what is wrong there."""
    read = defaults.read(os.environ)
    yield from (Check("Default", "ok", typed, place) for typed, place in defaults.shown(read))
    yield from (Check("Default", "missing", why, "correct it, or remove it") for why in read.faults)
    yield from (Check("Default", "optional", why, "unset it, unless another program reads it") for why in read.unknown)


def _fault(plugin: plugins.Plugin, group: plugins.Group) -> str | None:
    """Return why a plug-in is left out, by the check of its group; None if it is not."""
    if why := plugins.fault(plugin, object):  # before what follows imports torch, which may be what is missing
        return why
    if group == "schemes":
        from actbench.scheme import registry

        return registry.fault(plugin)
    if group == "kinds":
        from actbench.report import kinds

        return kinds.fault(plugin)
    if group == "exports":
        from actbench.cli import exports

        return exports.fault(plugin)
    return plugins.fault(plugin, _type_of(plugin.name, group))


def _type_of(name: str, group: plugins.Group) -> Any:
    if group == "workloads":
        from actbench.workload import Network

        return Network
    if group == "meters":
        from actbench.measuring.meters import MeterKind

        return MeterKind
    if group == "executors":
        return launcher.Ranks if name == launcher.RANKS else clusters.Opening
    if group == "benches":
        from actbench.run.worker import Bench

        return Bench
    return Typer


def _plugins() -> Iterator[Check]:
    """Yield what each package brings to each group, and each plug-in that cannot be used."""
    for group in get_args(plugins.Group):
        of_package: dict[str, list[str]] = {}
        for plugin in plugins.installed(group).values():
            if why := _fault(plugin, group):
                found = f"{plugin.name}, of {plugin.package}, is left out: {why}"
                yield Check(f"Plug-ins: {group}", "optional", found, f"update or remove {plugin.package.split()[0]}")
            else:
                of_package.setdefault(plugin.package, []).append(plugin.name)
        for package, names in of_package.items():
            yield Check(f"Plug-ins: {group}", "ok", f"{', '.join(names)}, of {package}")


def verdict(checks: Sequence[Check]) -> str:
    """Return one sentence: what works here, and the commands that mend what does not."""
    if missing := [f"{check.name}: {check.advice}" for check in checks if check.verdict == "missing"]:
        return f"actbench does not work here yet. {'; '.join(missing)}."
    here = {check.name: check for check in checks}
    if here["CUDA"].verdict != "ok":
        return (
            "Simulating cards and measuring on the CPU work here; to measure on a GPU: "
            f"{here['CUDA'].advice.partition(';')[0]}."
        )
    if "Extra: cuda" not in here:
        return "All works here, as far as is known: whether kernels for GPUs do is not; " + here["Extras"].advice + "."
    if here["Extra: cuda"].verdict != "ok":
        return 'All but our kernels for GPUs works here; this installs them: pip install "actbench[cuda]".'
    return "All works here: simulating cards, and measuring on the CPU and on this GPU."


@command(rank=100)
def doctor() -> None:
    """Show what this machine has, what is missing, and the command that installs it.

    Exit status is 1 if something is missing that actbench needs.

    Example: actbench doctor
    """
    from rich.markup import escape

    checks = examine()
    table = plain_table("", "what", "found", "what to do")
    marks = {"ok": "[green]ok[/]", "optional": "[yellow]–[/]", "missing": "[red]missing[/]"}
    for check in checks:
        table.add_row(marks[check.verdict], escape(check.name), escape(check.found), escape(check.advice))
    told = verdict(checks)
    console().print(told, markup=False, soft_wrap=True)
    console().print(table)
    console().print(told, markup=False, soft_wrap=True)  # which is what is on the screen in the end
    if any(check.verdict == "missing" for check in checks):
        raise Exit(1)
