from __future__ import annotations

import ast

import pytest

from actbench.tools.fit.paste import line_for


@pytest.mark.parametrize(
    ("scheme", "optimizer", "line"),
    [
        ("checkpoint", "AdamW", 'model = actbench.convert(model, "checkpoint")'),
        ("qlora:16", None, 'model = actbench.convert(model, "qlora:16")'),
        ("adam8bit", "AdamW", "optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=lr)"),
        ("adam8bit", "Adam", "optimizer = torchao.optim.Adam8bit(model.parameters(), lr=lr)"),
        ("optimizer_offload", "SGD", "optimizer = actbench.optim.HostOptimizer(optimizer)"),
    ],
)
def test_the_line_uses_the_scheme(scheme: str, optimizer: str | None, line: str) -> None:
    assert line_for(scheme, optimizer) == line
    ast.parse(line)
