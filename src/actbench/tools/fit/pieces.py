"""The code of plans in pieces, each with its heading."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from actbench.model.scripts import Script
from actbench.simulator import profiles
from actbench.tools.fit.code import code_for
from actbench.tools.fit.paste import lines_for
from actbench.tools.fit.records import Tried


def pieces_of(plans: Iterable[tuple[str, Tried]], most: int) -> tuple[tuple[str, str], ...]:
    """Return the pieces of code of the first plans that change something, at most so many, each with its heading.

    Each plan comes with its name.
    """
    found: list[tuple[str, str]] = []
    for name, plan in [(name, plan) for name, plan in plans if not plan.is_unchanged][:most]:
        script = plan.case.script
        pieces = _of_model(plan) if script is None else _of_script(plan, script)
        found += [(f"{name}: {what}", text) for what, text in pieces]
    return tuple(found)


def _of_model(plan: Tried) -> Iterator[tuple[str, str]]:
    """Yield the code that trains a model by a plan, and the command that measures it."""
    code = code_for(plan.case, plan.measured)
    yield "a loop of your own", code.loop
    if code.trainer:
        yield "with transformers' Trainer", code.trainer
    else:
        yield "not with transformers' Trainer", f"# {code.why_no_trainer}\n"
    yield "the command that measures it on the device", f"{code.command}\n"


def _of_script(plan: Tried, script: Script) -> Iterator[tuple[str, str]]:
    """Yield what to paste into a script, and the command that shows all of the plan's step."""
    case, lines = plan.case, []
    for line in lines_for(case.scheme, plan.measured.optimizer) if case.scheme != "exact" else ():
        is_of_model = line.startswith("model")
        where = "where the model is made, before its optimizer is" if is_of_model else "after its optimizer is made"
        lines += [f"# {where}", line]
    if lines:
        modules = ("actbench", "actbench.optim", "torchao.optim", "bitsandbytes.optim")
        used = [f"import {each}" for each in modules if f"{each}." in "".join(lines)]
        yield f"in {script.target}", "\n".join([*used, *lines]) + "\n"
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
    limit = profile.step_bytes(case.memory_limit_bytes)
    words = [f"actbench run --device-profile {shlex.quote(case.device_profile or profile.name)}"]
    words += [f"--memory-limit {limit}B"] if limit != profile.step_bytes() else []
    words += [f"--batch-size {script.batch_size}"] if script.batch_size else []
    words += [f"-s {shlex.quote(case.scheme)}"] if case.scheme != "exact" else []
    yield "simulated again, with what holds the memory", f"{' '.join(words)} {script.text}\n"
