"""What packs actbench in other forms needs what ``pyproject.toml`` needs, and is of the release to come."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
RECIPE = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
OF_CONDA = {"huggingface-hub": "huggingface_hub", "torch": "pytorch"}


def needed(requirements: list[str]) -> set[tuple[str, ...]]:
    return {tuple(part.strip() for part in text.split(">=")) for text in requirements}


def named_as_in_conda(requirements: list[str]) -> set[tuple[str, ...]]:
    return {(OF_CONDA.get(name, name), version) for name, version in needed(requirements)}


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    run, host = needed(RECIPE["requirements"]["run"]), needed(RECIPE["requirements"]["host"])

    assert run == named_as_in_conda(PROJECT["dependencies"]) | {("python", "${{ python_min }}")}
    assert host == needed(PYPROJECT["build-system"]["requires"]) | {("python ${{ python_min }}.*",), ("pip",)}


def test_the_conda_recipe_says_of_the_package_what_it_says_of_itself() -> None:
    variants = yaml.safe_load((ROOT / "packaging" / "conda" / "variants.yaml").read_text())

    assert variants["python_min"] == [PROJECT["requires-python"].removeprefix(">=")]
    assert RECIPE["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    assert RECIPE["about"]["license"] == PROJECT["license"]


def test_versions_without_a_tag_are_of_the_release_to_come() -> None:
    headings = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    fallback = PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)

    assert fallback == f"{headings[0]}.dev0"
    assert f'default="{fallback}"' in RECIPE["context"]["version"]
    assert set(cited) <= set(headings)


def test_the_image_is_of_a_python_that_is_supported() -> None:
    versions = re.findall(r"^FROM python:([\d.]+)", (ROOT / "packaging" / "Dockerfile").read_text(), re.MULTILINE)

    assert len(set(versions)) == 1
    assert f"Programming Language :: Python :: {versions[0]}" in PROJECT["classifiers"]
