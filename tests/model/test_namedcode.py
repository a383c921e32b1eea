"""What names code, by its form alone, wherever it stands in a value."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from actbench import plugins
from actbench.model.namedcode import named_code
from actbench.plugins import Plugin


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("evil.py:f", ("evil.py:f",)),
        ("fewbit:3,functions=gelu/a b/evil.py:f+checkpoint", ("b/evil.py:f",)),
        ("3,functions=../evil.PY:f", ("../evil.PY:f",)),
        ("fewbit:3,functions=evil.things:f", ("evil.things:f",)),
        ("checkpoint evil.things:f,x.py:g", ("x.py:g", "evil.things:f")),
        ("evil:f", ()),  # nothing of actbench's own imports a module by its name
        ("encode:fp8:e4m3+lora:16", ()),
        ("torchvision:resnet50", ()),
        ("hf:org/name.v2", ()),
        ("gpt2@num_hidden_layers=2", ()),
    ],
)
def test_code_is_found_by_its_form(text: str, found: tuple[str, ...]) -> None:
    assert named_code(text) == found


def test_a_word_behind_a_word_is_a_module_where_another_package_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Plugin):
        package = "theirs 1.0"

    groups = {
        "schemes": {"theirs": Theirs("theirs", EntryPoint("theirs", "theirs:S", "actbench.schemes"))},
        "workloads": {"mlp": Theirs("mlp", EntryPoint("mlp", "theirs:N", "actbench.workloads"))},
    }
    monkeypatch.setattr(plugins, "installed", lambda group: groups[group])

    assert named_code("theirs:4,mode=fast") == ()
    assert named_code("theirs:4,hook=evil:f") == ("evil:f",)
    assert named_code("theirs:evil:f") == ("evil:f",)
    assert named_code("mlp@make=evil:f") == ("evil:f",)
    assert named_code("cup", is_ours=False) == ()
    assert named_code("evil:f", is_ours=False) == ("evil:f",)
