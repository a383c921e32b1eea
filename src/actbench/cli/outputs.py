"""The flags for what a verb writes: tables, records, and columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from actbench.cli.app import STDOUT, file_option, option
from actbench.errors import UsageError
from actbench.results.tables.selection import CHOICES, names_in

JsonOption = Annotated[Path | None, file_option("--export-json", "Write the records, or what is compared, as JSON.")]


@dataclass(frozen=True)
class TableFlags:
    """Files to write a table to."""

    export_markdown: Annotated[Path | None, file_option("--export-markdown", "Write the table as Markdown.")] = None
    export_csv: Annotated[
        Path | None, file_option("--export-csv", "Write the table as CSV, numbers in full and without units.")
    ] = None
    export_html: Annotated[
        Path | None,
        file_option(
            "--export-html --html",
            "Write one HTML page that needs no network: tables that sort and filter, charts of records "
            "(actbench[html]), settings and commands.",
        ),
    ] = None

    @property
    def take_stdout(self) -> bool:
        """Whether an export goes to standard output; text for readers then goes to standard error."""
        return STDOUT in (getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ExportFlags(TableFlags):
    """Files to write a table and its records to."""

    export_json: JsonOption = None


@dataclass(frozen=True)
class ResultFlags(ExportFlags):
    """Flags: which results are shown, and the files to write them to."""

    columns: Annotated[
        str | None,
        option(
            "--columns",
            "Show these columns, here and in Markdown, CSV and HTML: peak,saved,speed. Columns that distinguish rows "
            f"come first; name model, batch, scheme or meter to select those too. There are {', '.join(CHOICES)}.",
            metavar="NAMES",
        ),
    ] = None

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the selected columns.

        Raises:
            UsageError: There is no such column.
        """
        try:
            return () if self.columns is None else names_in(self.columns)
        except UsageError as error:
            raise UsageError(f"--columns: {error}") from None
