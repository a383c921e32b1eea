"""The pages of the site that are made; ``make docs`` builds the whole of it, strictly."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer

from actbench import scheme as registry
from actbench.cli.app import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generated() -> Any:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_pages_link_to_is_in_the_repository(generated: Any) -> None:
    pages = generated.linked_pages()

    assert {"index.md", "contributing.md", "source/examples/train.py.md", "source/results/agreement/index.md"} <= set(
        pages
    )
    assert all(text.strip() for text in pages.values())


def test_a_link_to_what_is_not_there_is_refused(generated: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/run.md links to nowhere.md"):
        generated.relinked("[here](nowhere.md)", "run.md")


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("index.md", "docs/fit.md#what-it-prints", "fit.md#what-it-prints"),
        ("run.md", "../examples/train.py", "source/examples/train.py.md"),
        ("run.md", "../results/agreement", "source/results/agreement/index.md"),
        ("decisions/0037-plans-are-solved.md", "../fit.md", "../fit.md"),
        ("fit.md", "../CONTRIBUTING.md#what-is-public", "contributing.md#what-is-public"),
        ("run.md", "https://example.org/x", "https://example.org/x"),
        ("run.md", "#limits", "#limits"),
    ],
)
def test_links_lead_to_pages(generated: Any, page: str, link: str, becomes: str) -> None:
    assert generated.relinked(f"see [it]({link})", page) == f"see [it]({becomes})"
    assert generated.relinked(f"```\n[it]({link})\n```", page) == f"```\n[it]({link})\n```"


def test_a_page_and_its_origin_name_each_other(generated: Any) -> None:
    for path in ("README.md", "docs/run.md", "examples/train.py", "results/agreement", "examples/plugin/README.md"):
        assert str(generated.origin_of(generated.page_of(PurePosixPath(path)))) == path


def test_the_reference_has_each_command_with_its_options(generated: Any) -> None:
    text = generated.commands()

    for name in typer.main.get_command(app).list_commands(None):  # type: ignore[attr-defined]
        assert f"## `actbench {name}`" in text
    assert "`-b, --batch-size" in text


def test_the_reference_has_each_method_with_its_keys(generated: Any) -> None:
    text = generated.methods()

    for name in registry.find_schemes():
        assert f"{{ #{name} }}" in text
    assert "| bits | whole number | 3 |" in text


def test_each_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))

    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named


def test_each_message_of_the_source_is_on_the_page(generated: Any) -> None:
    page = generated.messages()

    # a text, one with what was found, one that stands in a constant, one by .format
    assert "| the name of the recipe is empty |" in page
    assert "{text} is not an amount of memory: it is more than 8 EiB" in page
    assert "fake tensors do not show what a CPU saves for recurrent layers" in page
    assert page.count("\n| ") > 650
