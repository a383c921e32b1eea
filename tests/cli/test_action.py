"""The action that comments on pull requests runs here, with a repository and an environment like GitHub's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from actbench.cli.app import app, verbs_of
from actbench.model.measured import MeasuredRecord

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".github" / "actions" / "memory.sh"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
MakeRecord = Callable[..., MeasuredRecord]

ACTBENCH = """#!{python}
import pathlib, shutil, sys
words = sys.argv[1:]
if words[0] == "run":
    assert words[1] == "--output", words
    if words[3:] != ["-s", "checkpoint", "train.py", "--text", "a b"]:
        sys.exit(f"unexpected: {{words}}")
    if not pathlib.Path("train.py").exists():
        sys.exit(2)
    shutil.copy(pathlib.Path("train.py").read_text().strip(), words[2])
    sys.exit(0)
from actbench.cli import main
main()
"""

GH = """#!{python}
import json, pathlib, sys
calls = pathlib.Path({calls!r})
words = sys.argv[1:]
fields = [word.partition("=@")[2] for word in words if word.startswith("body=@")]
body = pathlib.Path(fields[0]).read_text() if fields else None
calls.write_text(calls.read_text() + json.dumps([words, body]) + "\\n")
if "--jq" in words:
    print({own!r})
"""


class Repository:
    """A repository with a base and a branch whose script is the name of the results that it has."""

    def __init__(self, folder: Path, before: Path | None, after: Path, own: str = "") -> None:
        self.folder, self.calls = folder / "repo", folder / "calls"
        self.calls.write_text("")
        tools = folder / "tools"
        tools.mkdir()
        self.folder.mkdir()
        for name, text in {
            "actbench": ACTBENCH.format(python=sys.executable),
            "gh": GH.format(python=sys.executable, calls=str(self.calls), own=own),
        }.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        (tools / "python").symlink_to(sys.executable)
        self._git("init", "-q")
        self._commit(None if before is None else str(before))
        base = self._git("rev-parse", "HEAD").strip()
        self._commit(str(after))
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RUNNER_TEMP": str(folder),
            "GITHUB_REPOSITORY": "someone/net",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "GITHUB_OUTPUT": str(folder / "output"),
            "ACTBENCH_DEVICE_PROFILE": "rtx-4090",
            "ACTBENCH_QUIET": "1",
            "BASE_SHA": base,
            "PULL_REQUEST": "7",
            "COMMAND": "run -s checkpoint train.py --text 'a b'",
            "FAIL_ON": "",
            "NAME": "GPU memory",
            "COMMENT": "true",
        }

    def _git(self, *words: str) -> str:
        named = ("-c", "user.name=x", "-c", "user.email=x@y")
        return subprocess.run(
            ["git", *named, *words], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout

    def _commit(self, text: str | None) -> None:
        (self.folder / "README").write_text("x" if text is None else text)
        if text is not None:
            (self.folder / "train.py").write_text(text)
        self._git("add", "-A")
        self._git("commit", "-q", "-m", "change")

    def run(self, **changed: str) -> tuple[subprocess.CompletedProcess[str], list[tuple[list[str], str | None]]]:
        """Run the script of the action; return how it ended, and what gh was asked for."""
        done = subprocess.run(
            ["bash", SCRIPT],
            cwd=self.folder,
            env={**self.environment, **changed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done, [tuple(json.loads(line)) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def results(make_record: MakeRecord, tmp_path: Path) -> tuple[Path, Path]:
    """Return results of a base, and those of a branch that needs a tenth more."""
    files = []
    for name, peak in {"before": 1000, "after": 1100}.items():
        rows = [make_record(scheme, model="train.py", peak_bytes=peak) for scheme in ("exact", "checkpoint")]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    return files[0], files[1]


def test_one_comment_has_the_table_beside_the_base(results: tuple[Path, Path], tmp_path: Path) -> None:
    done, calls = Repository(tmp_path, *results).run()

    assert done.returncode == 0, done.stderr
    (listed, _), (posted, body) = calls
    assert listed[:3] == ["api", "--paginate", "repos/someone/net/issues/7/comments"]
    assert posted[:4] == ["api", "--silent", "--method", "POST"]
    assert body is not None
    assert body.startswith("<!-- actbench: GPU memory -->\n## GPU memory\n")
    assert "| train.py | 8 | checkpoint |" in body
    assert "+10.0 %" in body
    assert (tmp_path / "summary.md").read_text() == body
    assert Path((tmp_path / "output").read_text().strip().partition("=")[2]).is_file()


def test_a_comment_that_is_there_is_changed(results: tuple[Path, Path], tmp_path: Path) -> None:
    done, calls = Repository(tmp_path, *results, own="99").run()

    assert done.returncode == 0, done.stderr
    assert calls[1][0][:5] == ["api", "--silent", "--method", "PATCH", "repos/someone/net/issues/comments/99"]


def test_a_broken_limit_fails_the_step_and_is_commented_too(results: tuple[Path, Path], tmp_path: Path) -> None:
    repository = Repository(tmp_path, *results)
    done, calls = repository.run(FAIL_ON="peak:2%\n\npeak:>8GiB\n")

    assert done.returncode == 1
    assert done.stdout.count("::error title=limit broken%3A peak%3A2%") == 2, done.stdout
    assert len(calls) == 2
    assert repository.run(FAIL_ON="peak:20%")[0].returncode == 0


def test_a_base_without_the_script_leaves_the_branch_alone(results: tuple[Path, Path], tmp_path: Path) -> None:
    done, calls = Repository(tmp_path, None, results[1]).run(FAIL_ON="peak:2%")

    assert done.returncode == 0, done.stderr
    assert "This branch alone" in (calls[-1][1] or "")
    assert "The limits of fail-on were not checked" in (calls[-1][1] or "")
    assert "::warning title=actbench::The limits of fail-on were not checked" in done.stdout


def test_a_long_comment_is_cut_between_lines_and_no_character(make_record: MakeRecord, tmp_path: Path) -> None:
    files = []
    for name in ("before", "after"):
        rows = [make_record("exact", model=f"größe{'é' * 150}{i}.py", batch_size=8) for i in range(400)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    done, calls = Repository(tmp_path, *files).run()

    assert done.returncode == 0, done.stderr
    whole, body = (tmp_path / "summary.md").read_text(), calls[-1][1] or ""
    *kept, _, rest = body.splitlines()
    assert len(whole) > 65_536 > len(body) > 59_000
    assert kept == whole.splitlines()[: len(kept)]
    assert rest == "The rest is in the summary of the run."


def test_outside_of_pull_requests_nothing_is_posted(results: tuple[Path, Path], tmp_path: Path) -> None:
    repository = Repository(tmp_path, *results)

    assert repository.run(PULL_REQUEST="", BASE_SHA="")[1] == []
    assert repository.run(COMMENT="false")[1] == []
    failed, calls = repository.run(COMMAND="run")
    assert (failed.returncode != 0, calls) == (True, [])
    assert "::error title=actbench::the command stored no row: run" in failed.stdout


def test_the_action_gives_its_script_what_it_reads_and_expands_no_input_in_a_shell() -> None:
    *_, step = ACTION["runs"]["steps"]
    given = {
        *step["env"],
        "RUNNER_TEMP",
        "GITHUB_REPOSITORY",
        "GITHUB_STEP_SUMMARY",
        "GITHUB_OUTPUT",
        "GITHUB_ACTION_PATH",
    }
    text = SCRIPT.read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", text)) | set(re.findall(r'environ\["(\w+)"\]', text))

    assert read - given == set()
    assert all("${{" not in each.get("run", "") for each in ACTION["runs"]["steps"])
    used = {name for each in ACTION["runs"]["steps"] for name in re.findall(r"inputs\.([\w-]+)", json.dumps(each))}
    assert used == set(ACTION["inputs"])
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", SCRIPT]).returncode == 0


def test_the_hook_is_a_command_with_options_that_exist() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    name, verb, *options = hook["entry"].split()

    assert name == "actbench"
    assert set(options) <= {flag for each in verbs_of(app)[verb].params for flag in each.opts}
    assert hook["id"] in (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
