"""Checks of cases against limits in the forms that services read: JUnit's XML, and annotations of GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from xml.etree import ElementTree

from actbench.report.compare import Check, Comparison
from actbench.report.plain import plain

_NOT_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_CHECKED = "no case could be checked"
_NEW = "the first file has no value of this case to compare with"


def junit(comparison: Comparison) -> str:
    """Return JUnit's XML: a suite for each limit, with a test for each case that was held to it.

    A case without an earlier value to compare with is skipped.
    """
    root = ElementTree.Element("testsuites", {"name": "actbench compare", **_counts(comparison.checks)})
    for limit, found in groupby(comparison.checks, key=attrgetter("limit")):
        checks = tuple(found)
        suite = ElementTree.SubElement(root, "testsuite", {"name": _text(limit), **_counts(checks)})
        for check in checks:
            name = _text(check.case or _NOT_CHECKED)
            test = ElementTree.SubElement(suite, "testcase", classname=_text(limit), name=name)
            if check.broken:
                message = _text(check.broken)
                ElementTree.SubElement(test, "failure", message=message, type="limit broken").text = message
            elif check.is_new:
                ElementTree.SubElement(test, "skipped", message=_NEW)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def github_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a line for each broken limit that GitHub Actions shows as an error of the run."""
    for check in comparison.checks:
        if check.broken:
            title = _escaped(f"limit broken: {check.limit}").replace(":", "%3A").replace(",", "%2C")
            yield f"::error title={title}::{_escaped(': '.join(filter(None, (check.case, check.broken))))}"


def _counts(checks: Sequence[Check]) -> dict[str, str]:
    counts = {
        "tests": len(checks),
        "failures": sum(bool(check.broken) for check in checks),
        "errors": 0,
        "skipped": sum(check.is_new for check in checks),
    }
    return {name: str(count) for name, count in counts.items()}


def _text(text: str) -> str:
    """Return a text that XML can hold, in one line."""
    return _NOT_XML.sub("?", " ".join(plain(text).split()))


def _escaped(text: str) -> str:
    """Return a text as the message of a workflow command: it ends at the line's end, and percents are escapes."""
    return _text(text).replace("%", "%25")
