from __future__ import annotations

import ast

import pytest

from actbench.tools.fit.codegen import lines_for


@pytest.mark.parametrize(
    ("scheme", "optimizer", "lines"),
    [
        ("checkpoint", "AdamW", 'model = actbench.convert(model, "checkpoint")'),
        ("qlora:16", None, 'model = actbench.convert(model, "qlora:16")'),
        ("adam8bit", "AdamW", "optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=lr)"),
        ("adam8bit", "Adam", "optimizer = torchao.optim.Adam8bit(model.parameters(), lr=lr)"),
        ("optimizer_offload", "SGD", "optimizer = actbench.optim.HostOptimizer(optimizer)"),
        (
            "adam8bit+checkpoint,only=h.0+fewbit:2,only=h.1",
            "Adam",
            """model = actbench.convert(model, "fewbit:2,only=h.1+checkpoint,only=h.0")
optimizer = torchao.optim.Adam8bit(model.parameters(), lr=lr)""",
        ),
    ],
)
def test_the_lines_use_the_scheme(scheme: str, optimizer: str | None, lines: str) -> None:
    assert "\n".join(lines_for(scheme, optimizer)) == lines
    ast.parse(lines)
