"""``benchmarks/max_batch.py`` reads the searches out of the lines of progress."""

from __future__ import annotations

import sys
from typing import Any

LINES = """starts: roberta-base, exact
roberta-base, exact: batch 160 does not fit
roberta-base, exact: batch 152 fits (after 12 s)
[1/2] roberta-base, exact: peak 4.43 GiB, largest batch 152 (after 12 s)
starts: vit, exact (cpu)
measured: vit, exact (cpu): peak 293.44 MiB; the search for its largest batch follows
searches: vit, exact (cpu)
vit, exact (cpu): batch 7 fits (after 1m 02s, about 9 s left)
[2/2] vit, exact (cpu): peak 293.44 MiB, largest batch 7 (after 1m 02s)""".splitlines()


def test_the_search_of_each_row_is_timed(script: Any) -> None:
    assert script.rows(enumerate(LINES)) == {
        "roberta-base, exact": {"tried": [160, 152], "search_seconds": 3},
        "vit, exact (cpu)": {"tried": [7], "search_seconds": 2},
    }


def test_the_command_is_run_and_its_progress_read(script: Any) -> None:
    code = f"import sys; print({chr(10).join(LINES)!r}, file=sys.stderr); sys.exit(1)"
    found = script.run([sys.executable, "-c", code])

    assert found["exit_code"] == 1
    assert found["wall_seconds"] >= 0
    assert len(found["rows"]) == 2
