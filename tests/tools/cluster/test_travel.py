"""Which files travel to the nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import UsageError
from actbench.model.records import Case
from actbench.tools.cluster.node import files_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which is one for the test."""
    here = tmp_path / "here"
    (here / "models").mkdir(parents=True)
    monkeypatch.chdir(here)
    return here


def test_files_that_models_schemes_and_profiles_name_travel(folder: Path) -> None:
    for name in ("models/own.py", "steps.py", "..card.toml", "unused.py"):
        (folder / name).write_text(f"# {name}\ndef act(x):\n    return x\n")
    case = Case(model="models/own.py:build", scheme="fewbit:3,functions=relu/steps.py:act+checkpoint", batch_size=1)
    profiled = Case(model="resnet50", batch_size=1, device_profile="..card.toml")

    found = files_of([case, profiled, case])
    assert list(found) == ["models/own.py", "steps.py", "..card.toml"]
    assert all(text.startswith(f"# {name}\n") for name, text in found.items())


def test_presets_and_files_of_the_nodes_do_not_travel(folder: Path) -> None:
    shared = folder.parent / "shared.py"
    shared.write_text("")

    assert files_of([Case(model=f"{shared}:build", batch_size=1), Case(model="resnet50", batch_size=1)]) == {}
    assert files_of([Case(model="missing.py:build", batch_size=1)]) == {}  # the node says that it is missing


@pytest.mark.parametrize(
    ("name", "content", "naming"),
    [
        ("../above.py", b"", "outside of the current folder"),
        ("large.py", b"#" * (2**20 + 1), "more than 1.00 MiB"),
        ("broken.py", b"\xff\xfe", "is not text"),
    ],
)
def test_a_file_that_cannot_travel_is_named(folder: Path, name: str, content: bytes, naming: str) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(UsageError, match=f"--cluster: {name}.*{naming}"):
        files_of([Case(model=f"{name}:build", batch_size=1)])
