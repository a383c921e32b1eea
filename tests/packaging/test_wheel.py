"""What stands at the top of the repository reaches a user's machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_folder_with_code_is_a_package_that_setuptools_finds() -> None:
    folders = {file.parent for file in (ROOT / "src" / "actbench").rglob("*.py")}

    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
    for name in ("kernels", "recipes"):
        assert (ROOT / "src" / "actbench" / name).resolve() == ROOT / name


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
def test_a_wheel_holds_every_file_of_the_package_and_nothing_else(tmp_path: Path) -> None:
    copy, wheels = (
        tmp_path / "copy",
        tmp_path / "wheels",
    )  # in the repository a build would find what an earlier one left
    left = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "kernels", "recipes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    inside = {
        str(Path(folder, name).relative_to(copy / "src"))
        for folder, _, names in os.walk(copy / "src", followlinks=True)
        for name in names
    }
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, copy], check=True)
    (wheel,) = wheels.glob("*.whl")

    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == inside
