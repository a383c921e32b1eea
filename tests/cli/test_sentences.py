"""Sentences that first users stumbled over: none of their wordings is in the source, the pages, or a stored screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PLACES = ("src/**/*.py", "README.md", "docs/*.md", "docs/tutorials/*.md", "docs/reports/*.html", "results/**/*.md")
_SCREENS = ("tests/data/screens/*.txt",)
_JOINED = re.compile(r"""["']\s*\n\s*f?["']""")
"""Between two literals of one string."""

SENTENCES = (
    ("finetune.py barely fits into the 14.70 GiB of t4", "barely fits", "one verdict, and no two that disagree"),
    ("expect it to run out of memory", "expect it to run out of memory", "one verdict, and no two that disagree"),
    (
        "nothing fits within --max-slowdown 2: msln with resilu2",
        "nothing fits within --max-slowdown",
        "false where the budget ended the search",
    ),
    (
        "The time of --budget ended before all plans were simulated, so faster ones may be missing",
        "faster ones may be missing",
        "who reads it wants to know what to do: run the same command again",
    ),
    ("\n… is msln+resilu2+gact:L2.2 blocks 0-27", r"\n… is ", "the name of no plan: they have numbers"),
    ("… is -s 'lora:16+…' --optimizer adamw", r"\bis -s\b", "a plan is not an option"),
    ("gradients exact, adapters trained in place of the model", "adapters trained in place", "LoRA has a name"),
    (
        "Nothing takes at most 2 times the exact step's time",
        "Nothing takes at most",
        "what fits comes first",
    ),
    ("takes 2.77 s, so that it does not fit", "so that it does not fit", "time is not why it does not fit"),
    (
        "the fastest plan that treats all blocks alike",
        "treats all blocks alike",
        "the same for all blocks",
    ),
    ("Left out of the table above, for want of width", "for want of width", "old English, and not how to see it"),
    (
        "8 simulations crashed, so plans may be missing: oom.py failed",
        "crashed, so plans may be missing",
        "blames the script for a fault of actbench",
    ),
    ("The peak of a step, with batches of 64 rows", r"peak of a step, with batches of", "not the rows of that step"),
    ("no two steps in a row were alike", "no two steps in a row were alike", "what differs comes first"),
    (
        "Over the limit of 23.64 GiB, with the peak in the optimizer step",
        r"Over the limit of [^:]*, with the peak in|Over the limit of \{",
        "the same name three times, without the length in which rows differ",
    ),
    ("nothing of the peak is saved", "nothing of the peak is saved", "the subject is the scheme"),
    ("Host memory, which is no part of the peak, holds 164 B then", r"holds [\d.]+ (B|KiB) then", "too little to tell"),
    ("at work: finetune.py, exact (simulated)", "at work: ", "what runs is said by name and state"),
    ("0/1 ended (after 10.3 s)", r"\d/\d+ ended|_count\(\)\} ended", "nothing is known of what did not end"),
    (
        "simulating the exact step and single changes",
        "simulating the exact step and single changes",
        "no number of how many there are, and no deadline",
    ),
    ("1 measured, 0 failed, 0 taken from the results file", r"\b0 taken from", "of no file that was asked for"),
    (
        "All rows: meter simulated, class …, content of files 66d3e43",
        r"[Cc]ontent of files|All rows: (?=[^.:]*\b(meter|task|class|type|weights|attention|seed)\b)",
        "a list without a verb, and a word for a digest that nobody uses",
    ),
    (
        "no case of the two files could be checked",
        "no case of the two files could be checked",
        "why not: estimates are not compared",
    ),
    ("was measured before and is not now", "was measured before and is not now", "which of the files lacks it"),
    (
        "'2k' is neither a size, such as 8, nor a range",
        r"is neither a (size|number \(8\))",
        "what to write instead",
    ),
    (
        "recipe.toml: workload: is missing",
        r"workload: is missing|\"is missing: write a section",
        "what to write",
    ),
    ("random (the default, but of convert)", "but of convert", "no English"),
)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    files = [file for pattern in (*_PLACES, *_SCREENS) for file in sorted(ROOT.glob(pattern))]
    found = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert len(found) > 700
    return {name: _JOINED.sub("", text) if name.endswith(".py") else text for name, text in found.items()}


@pytest.mark.parametrize(("sentence", "pattern", "why"), SENTENCES)
def test_nothing_is_said_as_first_users_stumbled_over_it(
    texts: dict[str, str], sentence: str, pattern: str, why: str
) -> None:
    old = re.compile(pattern)

    assert old.search(sentence), "the pattern finds what it is about"
    assert [f"{name}: {why}" for name, text in texts.items() if old.search(text)] == []
