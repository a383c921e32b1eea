from __future__ import annotations

from pathlib import PurePosixPath

import pytest
import sizes


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("src/actbench/units.py", "(top)"),
        ("src/actbench_pytest.py", "(top)"),
        ("src/actbench/cli/app.py", "cli"),
        ("src/actbench/methods/dropit.py", "methods"),
        ("src/actbench/methods/fewbit/ops/mask/cpu.py", "methods/fewbit"),
        ("src/actbench/tools/html/export.py", "tools/html"),
        ("tests/cli/test_flags.py", "tests"),
    ],
)
def test_a_file_belongs_to_a_room(path: str, room: str) -> None:
    assert sizes.room_of(PurePosixPath(path)) == room


def test_rooms_are_counted_and_summed_beside_those_before() -> None:
    function = "def f():\n    async def g():\n        pass\n"
    sources = [("src/actbench/units.py", function), ("src/actbench/methods/a.py", "x = 1\n"), ("tests/t.py", function)]
    now = sizes.sizes((PurePosixPath(path), text) for path, text in sources)

    assert now == {"(top)": (3, 1, 2), "methods": (1, 1, 0), "tests": (3, 1, 2)}
    lines = sizes.table(now, {"(top)": sizes.Size(10, 2, 3), "gone": sizes.Size(5, 1, 1)}).splitlines()
    assert "| (top) | 3 | 1 | 2 | 10 | 2 | 3 |" in lines
    assert "| gone | 0 | 0 | 0 | 5 | 1 | 1 |" in lines
    assert lines[-1] == "| **source** | 4 | 2 | 2 | 15 | 3 | 4 |"
    assert sizes.table(now, {}).splitlines()[0] == "| room | lines | files | functions |"
