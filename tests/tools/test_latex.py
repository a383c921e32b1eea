from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas

from actbench.report.exporting import Exported
from actbench.report.tables import Table
from actbench.report.tables.values import Column
from actbench.tools.latex import LATEX

RECORDS = Path(__file__).parents[1] / "data" / "quickstart-2026-11.jsonl"


def latex(table: Table) -> str:
    text = LATEX.text(Exported([table], table.title, (), print))
    assert not isinstance(text, str | bytes)
    return "".join(text)


def test_a_table_has_its_rows_between_the_lines_of_booktabs(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "table.tex"
    assert cli("report", RECORDS, "--columns", "peak,saved", "--export-latex", file).status == 0
    text = file.read_text(encoding="utf-8")
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    (form,) = re.findall(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", text)

    assert all(row.endswith(r" \\") and row.count(" & ") == len(form) - 1 for row in body)
    assert r"resnet50 & 32 & checkpoint & simulated & 1.25 GiB & 55.0 \% \\" in body
    assert r"Peak $\downarrow$ & Saved $\uparrow$ \\" in text
    assert (text.count("\\begin{"), text.count("\\end{")) == (2, 2)


def test_marks_of_latex_are_shown_as_they_are() -> None:
    names = Column[str]("name", "A_b", "text", str)
    frame = pandas.DataFrame({"name": [r"x_1 {$y^2} \input{/etc/passwd} #~<|>"]}, dtype=object)
    table = Table("50 % & more", (names,), frame, notes=("a\n\nb",))
    text = latex(table)

    assert r"\caption{50 \% \& more}" in text
    assert "A\\_b \\\\\n" in text
    assert (
        r"x\_1 \{\$y\textasciicircum{}2\} \textbackslash{}input\{/etc/passwd\} "
        r"\#\textasciitilde{}\textless{}\textbar{}\textgreater{} \\"
    ) in text
    assert r"\footnotesize a b" in text
