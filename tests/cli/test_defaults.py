"""Defaults of options, of ``pyproject.toml`` in the current folder and of the environment."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import pytest

from actbench import plugins
from actbench.cli.app import app, command, option, verbs_of
from actbench.cli.conflicts import NEEDED, RULES
from actbench.cli.defaults import put_before, read
from actbench.errors import UsageError
from actbench.tools.fit.command import FitFlags


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str) -> None:
    Path("pyproject.toml").write_text(text, encoding="utf-8")


def put(*arguments: str, **variables: str) -> list[str]:
    return put_before(arguments, variables)[0]


FILE = """
[tool.actbench]
device-profile = "rtx-4090"
seed = 3

[tool.actbench.measure]
seed = 4
scheme = ["checkpoint", "fewbit:3"]
timeline = true
"""


def test_defaults_stand_before_what_is_typed_and_those_of_the_verb_are_stronger() -> None:
    written(FILE)

    of_measure = ["--seed=4", "--scheme=checkpoint", "--scheme=fewbit:3", "--timeline", "--device-profile=rtx-4090"]
    assert put("measure", "gpt2") == ["measure", *of_measure, "gpt2"]
    assert put("--debug", "convert", "gpt2") == ["--debug", "convert", "--seed=3", "gpt2"]


def test_what_is_typed_replaces_a_default() -> None:
    written(FILE)

    assert put("measure", "gpt2", "-s", "exact", "--seed", "5") == [
        *("measure", "--timeline", "--device-profile=rtx-4090", "gpt2", "-s", "exact", "--seed", "5")
    ]


@pytest.mark.slow
def test_the_environment_is_stronger_than_the_file_and_may_take_a_default_away() -> None:
    written(FILE)
    variables = {"ACTBENCH_SEED": "7", "ACTBENCH_MEASURE_SCHEME": "", "ACTBENCH_MEASURE_TIMELINE": "0"}

    assert put("measure", "gpt2", **variables) == ["measure", "--seed=7", "--device-profile=rtx-4090", "gpt2"]
    assert put("sweep", ACTBENCH_SCHEME="checkpoint offload", ACTBENCH_DEVICE_PROFILE="") == [
        *("sweep", "--scheme=checkpoint", "--scheme=offload", "--seed=3")
    ]


OF_ALL = """
[tool.actbench]
quiet = true
optimizer = "sgd"
dtype = "bf16"
max-batch = true
torch-era = "1.10"
top = 3
no-exact = true
"""


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("fit --script x.py", "--quiet"),
        ("fit gpt2 -v --optimizer adam", "--dtype=bf16"),
        ("measure gpt2", "--quiet --optimizer=sgd --dtype=bf16 --max-batch --torch-era=1.10 --no-exact"),
        ("measure gpt2 --ledger", "--quiet --optimizer=sgd --dtype=bf16 --torch-era=1.10 --top=3 --no-exact"),
        ("measure gpt2 --meter cpu,cuda -s exact", "--quiet --optimizer=sgd --dtype=bf16 --max-batch"),
        (
            "measure gpt2 --meter cpu,simulated",
            "--quiet --optimizer=sgd --dtype=bf16 --max-batch --torch-era=1.10 --no-exact",
        ),
    ],
)
def test_a_default_that_is_refused_beside_what_is_typed_is_left_out(command: str, defaults: str) -> None:
    written(OF_ALL)
    verb, *typed = command.split()

    assert put(verb, *typed) == [verb, *defaults.split(), *typed]


def test_every_option_that_gives_way_is_an_option() -> None:
    names = {option.name for verb in verbs_of(app).values() for option in verb.params}
    of_fit = {each.name for each in fields(FitFlags)} - {"device_profile", "batch_size", "memory_limit", "seed"}
    others = {each for rule in RULES for each in (rule.option, *rule.others)}
    of_script = {each for rule in RULES if rule.option == "script" for each in rule.others}

    assert others | set(NEEDED) | set(NEEDED.values()) <= names
    assert of_fit - {"script"} <= of_script


def test_a_script_keeps_its_own_arguments() -> None:
    written(FILE)

    assert put("run", "train.py", "--seed", "1") == [*("run", "--device-profile=rtx-4090", "train.py", "--seed", "1")]


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize(
    ("text", "naming"),
    [
        ("[tool.actbench]\nsede = 1", "pyproject.toml [tool.actbench]: there is no option 'sede'; did you mean seed?"),
        ("[tool.actbench.fit]\nsteps = 1", "pyproject.toml [tool.actbench.fit]: there is no option 'steps'"),
        ("[tool.actbench.fti]\nseed = 1", "[tool.actbench.fti]: there is no command 'fti'; did you mean fit?"),
        ("[tool.actbench]\nseed = 'x'", "[tool.actbench] seed: 'x' is not a whole number"),
        ("[tool.actbench]\nseed = true", "[tool.actbench] seed: --seed takes a value, and not true"),
        ("[tool.actbench]\ntimeline = 'maybe'", "[tool.actbench] timeline: 'maybe' is not true or false"),
        ("[tool.actbench]\nseed = [1, 2]", "seed takes one value, and not a list"),
        ("[tool.actbench]\nscheme = [{}]", "scheme is neither text, a number, true or false, nor a list of these"),
        ("[tool]\nactbench = 3", "pyproject.toml, tool.actbench: it is not a table of options"),
        ("[tool.actbench", "pyproject.toml is not valid TOML: "),
        (f"[tool.actbench]\nseed = {'[' * 5000}", "pyproject.toml is not valid TOML: it is nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_by_name_by_every_verb_but_doctor(cli: Any, text: str, naming: str) -> None:
    written(text)

    cli.refused("measure", "gpt2", naming=naming)
    assert cli("measure", "--help").status == 0
    assert read({}).faults[0].startswith("pyproject.toml")


@pytest.mark.parametrize(
    "line",
    [
        *("trust-remote-code = true", "trust-recipe = true", "cluster = 'ray://x'", "html = 'x.html'"),
        *("output = '../x'", r'output = "a\u0000b"', "module = true", "script = 'evil.py'"),
    ],
)
def test_a_folder_of_someone_else_trusts_no_code_names_no_host_and_writes_no_file(line: str) -> None:
    written(f"[tool.actbench]\n{line}")

    with pytest.raises(UsageError, match=f"type --{line.split()[0]}"):
        put("sweep", "gpt2")


@pytest.mark.parametrize(
    "line",
    [
        'scheme = ["fewbit:3,functions=evil.py:f"]',
        'scheme = ["checkpoint", "fewbit:3,functions=gelu/./down/evil.py:f+lora:8"]',
        'gelu-bits = "3,functions=evil.py:f"',
        'linear = "randomized:0.2+fewbit:3,functions=evil.py:f"',
        'optimizer = "evil.PY:f"',
        'device-profile = "evil.things:f"',
    ],
)
def test_a_file_names_no_code_in_any_option(line: str) -> None:
    Path("evil.py").write_text("def f(x): return x")
    written(f"[tool.actbench]\n{line}")
    name = line.split()[0]

    with pytest.raises(
        UsageError, match=rf"^pyproject.toml \[tool.actbench\]: {name} names code, .*evil.*: .*type --{name}"
    ):
        put("sweep", "gpt2")


def test_a_file_may_name_the_code_that_the_command_line_names_too_and_variables_any() -> None:
    Path("mine.py").write_text("def f(x): return x\ndef g(x): return x")
    written('[tool.actbench]\nscheme = ["fewbit:3,functions=mine.py:f"]')
    typed = ["measure", "mine.py:f", "-b", "1"]

    assert put(*typed) == ["measure", "--scheme=fewbit:3,functions=mine.py:f", *typed[1:]]
    with pytest.raises(UsageError, match=r"names code, mine\.py:f"):
        put("measure", "mine.py:g")
    written("")
    own = "fewbit:3,functions=mine.py:f"
    assert put("measure", "gpt2", ACTBENCH_SCHEME=own) == ["measure", f"--scheme={own}", "gpt2"]


def test_specifications_of_schemes_and_encodings_name_no_code() -> None:
    written(
        "[tool.actbench]\nscheme = ['encode:fp8:e4m3', 'fsdp:8,mixed=bf16', 'gact:L1,widths=linear:4/norm:8']\n"
        "[tool.actbench.encodings]\nencoding = ['fp8:e4m3']\n[tool.actbench.compare]\nfail-on = ['peak:>8GiB']"
    )

    assert not read({}).faults


def test_a_plugin_declares_which_of_its_options_a_file_may_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    @command()
    def brew(
        hook: Annotated[str, option("--hook", "A module to import.", only_typed=True)] = "", cup: str = ""
    ) -> None:
        """Brew."""

    theirs = EntryPoint("brew", "theirs:brew", "actbench.commands")
    found = {**plugins.installed("commands"), "brew": _Theirs("brew", theirs)}
    monkeypatch.setattr(plugins, "installed", lambda group: found if group == "commands" else {})
    monkeypatch.setattr(plugins, "find_plugin", lambda group, name, of: brew if name == "brew" else None)

    for line, why in (("hook = 'evil'", "type --hook"), ("cup = 'evil:f'", "cup names code, evil:f")):
        written(f"[tool.actbench.brew]\n{line}")
        assert why in read({}).faults[0]


class _Theirs(plugins.Plugin):
    package = "theirs 1.0"


def test_another_project_has_no_defaults() -> None:
    written("[project]\nname = 'other'\ndependencies = ['actbench']")

    assert put("measure", "gpt2") == ["measure", "gpt2"]


def test_a_variable_that_is_no_options_is_told_and_does_not_matter() -> None:
    assert put_before(["measure", "gpt2"], {"ACTBENCH_SEDE": "1", "ACTBENCH_DATA": "/data"}) == (
        ["measure", "gpt2"],
        ["ACTBENCH_SEDE sets no option; did you mean ACTBENCH_SEED?"],
    )
    with pytest.raises(UsageError, match=r"^ACTBENCH_SEED: 'x' is not a whole number"):
        put("measure", "gpt2", ACTBENCH_SEED="x")


def test_an_error_names_what_was_run_with_the_defaults(cli: Any) -> None:
    written("[tool.actbench]\nmemory-limit = 'much'")

    told = cli.refused("run", "--device-profile", "rtx-4090", "x.py", naming="--memory-limit")
    assert "that was: actbench run --memory-limit=much --device-profile rtx-4090 x.py" in told
    assert sys.argv[1:3] == ["run", "--memory-limit=much"], "the command in records"


def test_doctor_shows_defaults_and_what_is_wrong(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ACTBENCH_FIT_BUDGET", "20")
    written("[tool.actbench]\ndevice-profile = 'rtx-4090'\nsede = 1")
    ended = cli("doctor")
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]

    assert ended.status == 1
    assert "ok Default --device-profile rtx-4090 pyproject.toml [tool.actbench] device-profile" in lines
    assert "ok Default actbench fit --budget 20 ACTBENCH_FIT_BUDGET" in lines
    assert any("there is no option 'sede'" in line for line in lines)
