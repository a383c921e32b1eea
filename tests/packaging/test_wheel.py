"""What stands at the top of the repository reaches a user's machine."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_package_of_the_source_tree_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    source = ROOT / "src"
    found = {".".join(file.parent.relative_to(source).parts) for file in source.rglob("__init__.py")}

    assert found | {"actbench.kernels", "actbench.recipes"} == declared


def test_the_lowest_versions_are_those_of_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if "==" in line)

    for name, version in (text.split(">=") for text in project["dependencies"]):
        assert f"{lowest[name]}.".startswith(f"{version}.")


def test_kernels_and_recipes_are_found_as_package_data() -> None:
    assert resources.files("actbench.kernels").joinpath("common.cuh").is_file()
    assert resources.files("actbench.recipes").joinpath("quickstart.toml").is_file()


@pytest.mark.slow
def test_a_wheel_holds_them_too(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    for source in [*(ROOT / "kernels").glob("*.cu*"), *(ROOT / "recipes").glob("*.toml")]:
        assert f"actbench/{source.parent.name}/{source.name}" in names
    assert "actbench/workloads/presets.toml" in names
    assert not {name for name in names if name.startswith("tests/")}
