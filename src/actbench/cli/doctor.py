from __future__ import annotations

from actbench.cli.app import Exit, app


@app.command()
def doctor() -> None:
    """Show what this machine has, what is missing, and the command that installs it.

    Exit status is 1 when something is missing that actbench cannot do without.

    Example: actbench doctor
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from actbench.doctor import examine

    checks = examine()
    table = Table("", "what", "found", "what to do", box=None, header_style="bold")
    marks = {"ok": "[green]ok[/]", "optional": "[yellow]–[/]", "missing": "[red]missing[/]"}
    for check in checks:
        table.add_row(marks[check.verdict], check.name, escape(check.found), escape(check.advice))
    Console().print(table)
    if any(check.verdict == "missing" for check in checks):
        raise Exit(1)
