"""Text that others wrote, made safe to show: it cannot steer a terminal, reorder a line or hide characters."""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, marks of direction and other formats, surrogates, line ends
_KEPT = {"\n", "\t", "\u200c", "\u200d"}  # the last two join and separate letters in scripts and emoji
_LINKS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
_FORMULA = tuple("=+-@\t\n＝＋－＠")  # characters that begin a formula in spreadsheets


def plain(text: str) -> str:
    r"""Return a text with every invisible character written as an escape, such as ``\x1b``; tabs and newlines stay.

    Idempotent. Every text from a file, a model or a machine passes here once, where it leaves actbench: in
    :func:`~actbench.report.render.formats.cells` for tables, in ``remark`` and the progress of runs for standard
    error, in the entry point for errors. JSON has the original texts.
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, text.replace("\r\n", "\n").replace("\r", "\n")))


def markdown(text: str) -> str:
    """Return a plain text as one line of Markdown without tags, links, code or cells."""
    line = " ".join(plain(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _LINKS.sub(r"\\", _MARKS.sub(r"\\\g<0>", line))


def csv_cell(text: str) -> str:
    """Return a plain text, after a quote mark if a spreadsheet would run it as a formula; numbers stay numbers."""
    cell = plain(text)
    return f"'{cell}" if cell.startswith(_FORMULA) and not _is_number(cell) else cell


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return ascii(character)[1:-1]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
