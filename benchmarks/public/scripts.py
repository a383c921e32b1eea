"""Training scripts that others published, as they are, on a simulated card.

::

    .venv/bin/python benchmarks/public/scripts.py run --clones DIR    # what has no result in results/public-scripts
    .venv/bin/python benchmarks/public/scripts.py page                # docs/public-scripts.md, from the results

Each table beside this file is a source: a repository, a commit, and the scripts in it with what their authors
measured. Their code stays in the clones, folders ``OWNER+NAME`` or ``NAME`` in DIR, bare or not; nothing is fetched,
and nothing in them is changed. Each script runs in a new folder with what its table asks for: the repository, made-up
data, variables. A result is stored as it ends, so a run can be stopped and begun again; with words after ``run``, only
scripts whose names have one of them run, or all of a source that is one of them, again if they have a result.
``--twice`` runs each with an empty cache, and then again. ``--logs`` keeps what they print. ``--cpu`` runs those marked
``real`` on the CPU.

Of a source, a table has ``repository``, ``commit`` (or a tag), ``card``, ``command`` (what follows ``actbench``),
``environment``, ``data`` (functions of ``synthetic``, each with the place of what it makes), ``made`` (folders, each
with what ``hubdata`` fills it with), ``folders`` (made, empty), and ``script_in_log``: a path is that of a log which
begins with the script; ``note`` is said of all its rows. ``program`` names a file beside the table which is run in
place of a script that needs the network; the script's path is its first argument. Of a script a table has ``name``,
``path``, ``folder`` (where it runs; one of a log is put there), ``options`` (more of ``actbench``), ``arguments``,
``torch`` (what its authors ran), ``allocated_mib`` and ``reserved_mib`` (their peaks), ``reason`` (why the figures
differ) or ``left_out`` (why it is not run), and ``environment``, ``data``, ``made``, ``folders`` and ``program`` of its
own. With ``real = true`` ``--cpu`` runs it for real on the CPU, and simulated with the profile of a CPU: two peaks that
should be equal.

``seed`` draws a third of a source's scripts, without those marked ``seen``, before any of them is run: their errors
are reported apart, and nothing is changed after a look at them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hubdata
import synthetic

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "results" / "public-scripts"
PAGE = ROOT / "docs" / "public-scripts.md"
MIB = 2**20
LARGE = 0.03
"""Relative errors above this one are explained in words."""

_ALONE = {"OMP_NUM_THREADS": "1"}  # each thread of an operator has buffers of its own
_NO_SEARCH = ("--columns", "peak,reserved,over-limit")
"""What leaves out the runs after a step, with remedies and other batches."""
_END_OF_SCRIPT = "=" * 100
_LONGEST_SECONDS = 3600

Table = Mapping[str, Any]
Result = dict[str, Any]


def sources() -> dict[str, Table]:
    """Return the tables of all sources by their names."""
    return {file.stem: tomllib.loads(file.read_text()) for file in sorted(HERE.glob("*.toml"))}


def results(source: str) -> dict[str, Result]:
    """Return the results of a source's scripts by their names."""
    file = RESULTS / f"{source}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def run(clones: Path, words: Sequence[str], *, twice: bool, cpu: bool, missing: bool, logs: Path | None) -> None:
    """Run scripts without a result, or those that are named, and store their results; with ``cpu`` those on a CPU."""
    for source, table in sources().items():
        for script in table["script"]:
            found = results(source).get(script["name"], {})
            is_named = any(word in (source, script["name"]) or word in script["name"] for word in words)
            has_result = "real_cpu_bytes" in found if cpu else bool(found)
            is_left_out = "left_out" in script or (cpu and not script.get("real"))
            if is_left_out or (words and not is_named) or (has_result and (missing or not words)):
                continue
            print(f"{source}: {script['name']}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder, script.get("folder", ""))
                target = unpacked(clone(clones, table), table, script, Path(folder))
                log = None if logs is None else logs / f"{source} {script['name'].replace('/', ' ')}.txt"
                if cpu:
                    result = found | on_cpu(target, table, script, place, log)
                else:
                    result = ran(target, table, script, place, log, twice=twice)
            print(f"  {result}", flush=True)
            RESULTS.mkdir(parents=True, exist_ok=True)
            stored = json.dumps(results(source) | {script["name"]: result}, indent=1, sort_keys=True)
            (RESULTS / f"{source}.json").write_text(f"{stored}\n")


def clone(clones: Path, table: Table) -> Path:
    """Return the git directory of a source."""
    owner, _, name = table["repository"].partition("/")
    for folder in (clones / f"{owner}+{name}", clones / name):
        for each in (folder / ".git", folder / "repo", folder):
            if (each / "HEAD").exists():
                return each
    raise SystemExit(f"{clones} has no clone of {table['repository']}: {owner}+{name} or {name}")


def unpacked(git: Path, table: Table, script: Table, folder: Path) -> str:
    """Put a script, and what it reads, into a folder; return the words that run it."""
    told = ["git", "--git-dir", str(git)]
    if table.get("script_in_log"):
        log = subprocess.run([*told, "show", f"{table['commit']}:{script['path']}"], capture_output=True, check=True)
        target = "train_gpt.py"
        place = folder / script.get("folder", "")
        place.mkdir(exist_ok=True)
        (place / target).write_text(log.stdout.decode(errors="replace").partition(_END_OF_SCRIPT)[0])
    else:
        without = (f":(exclude){name}" for name in absent(told, table["commit"]))
        archive = subprocess.run([*told, "archive", table["commit"], ".", *without], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        target = os.path.relpath(script["path"], script.get("folder", ""))
    program = script.get("program", table.get("program"))
    if program:
        shutil.copy(HERE / program, folder / script.get("folder", ""))
        target = f"{program} {target}"
    for name in _both("folders", table, script, ()):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, where in _both("data", table, script, {}).items():
        getattr(synthetic, name)(folder / where)
    for where, name in _both("made", table, script, {}).items():
        hubdata.made(name, folder / where)
    return target


def absent(told: Sequence[str], commit: str) -> list[str]:
    """Return the files of a commit that a clone lists and does not hold, as those that leave out the largest."""
    listed = subprocess.run([*told, "ls-tree", "-r", commit], capture_output=True, check=True, text=True).stdout
    names = {line.split()[2]: line.partition("\t")[2] for line in listed.splitlines() if " blob " in line}
    asked = [*told, "cat-file", "--batch-check"]
    found = subprocess.run(asked, input="\n".join(names), capture_output=True, check=True, text=True).stdout
    return [names[line.split()[0]] for line in found.splitlines() if line.endswith(" missing")]


def _both(key: str, table: Table, script: Table, nothing: Any) -> Any:
    """Return what a table says of all its scripts and of one, together."""
    of_all, of_one = table.get(key, nothing), script.get(key, nothing)
    return {**of_all, **of_one} if isinstance(nothing, dict) else [*of_all, *of_one]


def ran(target: str, table: Table, script: Table, folder: Path, log: Path | None, *, twice: bool) -> Result:
    """Run a script in its folder, and return what came of it."""
    told_to = [*shlex.split(table["command"]), *shlex.split(script.get("options", ""))]
    with tempfile.TemporaryDirectory() as cache:
        told = {"XDG_CACHE_HOME": cache} if twice else {}
        runs = [_recorded(told_to, target, table, script, folder, log, told) for _ in range(1 + twice)]
    record, *_ = runs[-1]
    times = [seconds for _, *seconds in runs]
    outcome = record.get("outcome", {"message": "ended without a result"})
    result = {
        "command": f"{shlex.join(['actbench', *told_to])} {target}",
        "actbench": record.get("versions", {}).get("commit"),
        "torch": record.get("versions", {}).get("torch"),
        "seconds": round(times[0][0], 1),
        "processor_seconds": round(times[0][1], 1),
    }
    if twice:
        result |= {"seconds_again": round(times[1][0], 1), "processor_seconds_again": round(times[1][1], 1)}
    if outcome.get("peak_bytes") is None:
        return {**result, "failed": outcome.get("message", "")}
    named = ("peak_bytes", "script_peak_bytes", "reserved_bytes")
    return {**result, **{name: outcome.get(name) for name in named}}


def on_cpu(target: str, table: Table, script: Table, folder: Path, log: Path | None) -> Result:
    """Run a script for real on the CPU, and simulated with the profile of one; return both peaks."""
    options, found = shlex.split(f"{table['command'].partition(' ')[0]} {script.get('options', '')}"), {}
    for name, more in (("real_cpu_bytes", "--meter cpu"), ("simulated_cpu_bytes", "--device-profile cpu")):
        record, *_ = _recorded([*options, *more.split()], target, table, script, folder, log, _ALONE)
        found[name] = record.get("outcome", {}).get("peak_bytes")
    return found


def _recorded(
    told_to: Sequence[str],
    target: str,
    table: Table,
    script: Table,
    folder: Path,
    log: Path | None,
    told: Mapping[str, str],
) -> tuple[Result, float, float]:
    """Run actbench on a script; return its record, and the time of all and that of processors."""
    exported = folder / "exported.json"
    exported.unlink(missing_ok=True)
    options = ["--timeout", str(_LONGEST_SECONDS), "--output", str(folder / "results"), "--force", *_NO_SEARCH]
    words = [told_to[0], *options, *told_to[1:], "--export-json", str(exported), *(() if log else ("--quiet",))]
    command = [sys.executable, "-m", "actbench", *words, *shlex.split(f"{target} {script.get('arguments', '')}")]
    environment = {**os.environ, **_both("environment", table, script, {}), **told}
    began = time.monotonic()
    with open(os.devnull if log is None else log, "ab") as file:
        file.write(f"$ {shlex.join(command[2:])}\n".encode())
        file.flush()
        started = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env=environment)
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
    record: Result = json.loads(exported.read_text())[-1] if exported.exists() else {}
    return record, time.monotonic() - began, used.ru_utime + used.ru_stime


def error(script: Table, result: Result, kind: str) -> float | None:
    """Return the relative error of a peak, ``allocated`` or ``reserved``; None where there is none to compare with."""
    simulated = result.get("script_peak_bytes" if kind == "allocated" else "reserved_bytes")
    published = script.get(f"{kind}_mib")
    return None if not simulated or not published else simulated / MIB / published - 1


def unseen(table: Table) -> set[str]:
    """Return the names of the third of a source's scripts that is looked at last."""
    names = [each["name"] for each in table["script"] if "left_out" not in each and not each.get("seen")]
    return set(random.Random(table["seed"]).sample(names, len(table["script"]) // 3)) if "seed" in table else set()


def page() -> Iterator[str]:
    """Yield the lines of the page of all sources."""
    yield _HEAD
    yield "| Source | Scripts | Run | Peaks compared | Median error | Worst error | On a CPU | Worst error | Left out |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for source, table in sources().items():
        yield _summary(f"[{table['repository']}](#{source})", source, table["script"])
        if drawn := unseen(table):
            yield _summary("of these, the unseen third", source, [e for e in table["script"] if e["name"] in drawn])
    for source, table in sources().items():
        yield from _section(source, table)


def _summary(title: str, source: str, scripts: Sequence[Table]) -> str:
    """Return a row: how many scripts run, and their errors; of reserved bytes where nobody published allocated ones."""
    found = results(source)
    kind = "allocated" if any("allocated_mib" in script for script in scripts) else "reserved"
    errors = [each for script in scripts if (each := error(script, found.get(script["name"], {}), kind)) is not None]
    of_cpu = (_error_on_cpu(found.get(script["name"], {})) for script in scripts)
    on_cpu = [each for each in of_cpu if each is not None]
    return _line(
        title,
        len(scripts),
        sum("failed" not in found.get(script["name"], {"failed": ""}) for script in scripts),
        f"{len(errors)}{' (reserved)' if errors and kind == 'reserved' else ''}",
        f"{statistics.median(map(abs, errors)):.2%}" if errors else "",
        f"{max(errors, key=abs):+.1%}" if errors else "",
        len(on_cpu) or "",
        f"{max(on_cpu, key=abs):+.2%}" if on_cpu else "",
        sum("left_out" in script for script in scripts),
    )


def _section(source: str, table: Table) -> Iterator[str]:
    found = results(source)
    yield f"\n## {source}\n"
    yield f"{table['repository']} at {table['commit'][:12]}, {table['card']}: `actbench {table['command']}`.\n"
    if "note" in table:
        yield f"{table['note']}\n"
    rows = [
        _row(script, found[script["name"]])
        for script in table["script"]
        if "left_out" not in script and script["name"] in found
    ]
    columns = [name for name in _COLUMNS if any(row[name] for row in rows)]
    if rows:
        yield _line(*(name.partition(":")[0] for name in columns))
        yield _line(*("---" if name in _WORDS else "---:" for name in columns))
    yield from (_line(*(row[name] for name in columns)) for row in rows)
    left_out = [script for script in table["script"] if "left_out" in script]
    if left_out:
        yield "\nLeft out:\n"
        yield from (f"- {script['name']}: {script['left_out']}." for script in left_out)
    waiting = [each["name"] for each in table["script"] if "left_out" not in each and each["name"] not in found]
    if waiting:
        yield f"\nNot run yet: {', '.join(waiting)}."


_WORDS = ("Script", "Torch", "Why")
_COLUMNS = (
    *("Script", "Torch", "Allocated, MiB", "Allocated, simulated", "Error:allocated", "Reserved, MiB"),
    *("Reserved, simulated", "Error:reserved", "CPU, bytes", "CPU, simulated", "Error:cpu", "Seconds", "Why"),
)
"""Columns of a source's table; those without a cell are left out. A colon ends what is printed."""


def _row(script: Table, result: Result) -> Mapping[str, str]:
    """Return the cells of a script's row by their columns."""
    row = {"Script": script["name"], "Torch": script.get("torch", ""), "Seconds": f"{result['seconds']:,.0f}"}
    for kind, name in (("allocated", "script_peak_bytes"), ("reserved", "reserved_bytes")):
        off, simulated = error(script, result, kind), result.get(name)
        row[f"{kind.capitalize()}, MiB"] = f"{script[f'{kind}_mib']:,}" if f"{kind}_mib" in script else ""
        row[f"{kind.capitalize()}, simulated"] = f"{simulated / MIB:,.0f}" if simulated else ""
        row[f"Error:{kind}"] = f"{off:+.2%}" if off is not None else ""
    real, simulated = result.get("real_cpu_bytes"), result.get("simulated_cpu_bytes")
    row["CPU, bytes"] = f"{real:,}" if real else ""
    row["CPU, simulated"] = f"{simulated:,}" if simulated else ""
    off = _error_on_cpu(result)
    row["Error:cpu"] = f"{off:+.3%}" if off is not None else ""
    return row | {"Why": script.get("reason", "") or result.get("failed", "").replace("\n", " ")}


def _error_on_cpu(result: Result) -> float | None:
    real, simulated = result.get("real_cpu_bytes"), result.get("simulated_cpu_bytes")
    return simulated / real - 1 if real and simulated else None


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


_HEAD = """\
# Public scripts

Training scripts that others wrote and published, run by `actbench run` as they are on a simulated card. No GPU is
there, and nothing in the scripts is changed. Their data is made up, in the shapes that they read.
`benchmarks/public/scripts.py` makes this page from the tables beside it, which name the repository, the commit and the
file of each script, and from [results/public-scripts](../results/public-scripts).

Where the authors published peaks, these stand beside the simulated ones: *allocated* is the most that torch's tensors
took since the script began, with evaluations between its steps, and *reserved* the most that torch's allocator took of
the card. *CPU* is the peak of the script as it runs for real on a CPU, in one thread, beside that of a simulation with
the profile of a CPU. *Torch* is what the authors ran; the simulation compiles with the torch that is installed.
*Seconds* are those of one run on two cores that others used, too. Each row with an error above 3 % says why.
"""


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("--clones", type=Path, required=True)
    running.add_argument("--twice", action="store_true")
    running.add_argument("--logs", type=Path, help="a folder for what the runs print")
    running.add_argument("--cpu", action="store_true", help="on the CPU, for real and simulated, those marked real")
    running.add_argument("--missing", action="store_true", help="of those that are named, only those without a result")
    running.add_argument("words", nargs="*")
    verbs.add_parser("page")
    asked = parser.parse_args()
    if asked.verb == "run":
        told = {name: getattr(asked, name) for name in ("twice", "cpu", "missing", "logs")}
        run(asked.clones, asked.words, **told)
    else:
        PAGE.write_text("\n".join(page()).rstrip() + "\n")


if __name__ == "__main__":
    main()
