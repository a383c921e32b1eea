"""Rows of a source that measured many settings, or the same settings at several batches or sizes.

Its table has ``source``, ``commit``, ``card``, ``kind``, ``seed``, the ``unit`` of its figures in bytes, if that is not
one, with ``detail``, the name of it, and ``parts`` if it is of layers alone. For each ``setting`` it has the file of
the source, what was trained and how (or a ``title`` that says it), a ``command`` with ``{batch}`` in it, and the figure
at each batch of one GPU, or at each size that is varied; a card, a unit and a detail of its own, if they differ.
``class``, ``unstated`` and ``reason`` are those of ``published_peaks.toml``; ``left_out`` says why there is no command.
``seen`` are batches that were simulated before ``seed`` drew the rows that are looked at last; ``commands`` are what
they were simulated by then, or what those that were drawn keep, where it is another command.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

Table = Mapping[str, Any]
GIB = 2**30


def rows(table: Table) -> list[dict[str, Any]]:
    """Return the rows of a table that have a command, as those of ``published_peaks.toml`` are."""
    drawn = unseen(table)
    return [
        {
            "source": table["source"],
            "where": setting["where"],
            "setting": _title(setting, batch),
            "device": f"{setting['gpus']} x {card}" if "gpus" in setting else card,
            "kind": table["kind"],
            "published_gib": found * setting.get("unit", table.get("unit", 1)) / GIB,
            "class": setting.get("class", "agrees"),
            "unstated": setting.get("unstated", []),
            "command": setting.get("commands", {}).get(batch) or setting["command"].format(batch=batch),
            "unseen": (place, batch) in drawn,
            "whole": not table.get("parts", False),
            **{name: each[name] for each in (table, setting) for name in ("detail", "reason") if name in each},
        }
        for place, setting in enumerate(table["setting"])
        if "command" in setting
        for card in [setting.get("card") or table["card"]]
        for batch, found in setting["peaks"].items()
    ]


def unseen(table: Table) -> set[tuple[int, str]]:
    """Return places of settings and batches of the third of the rows that is looked at last."""
    names = [
        (place, batch)
        for place, setting in enumerate(table["setting"])
        for batch in setting["peaks"]
        if int(batch) not in setting.get("seen", ())
    ]
    return set(random.Random(table["seed"]).sample(names, len(names) // 3))


def left_out(table: Table) -> Iterator[str]:
    """Yield why rows of a table have no command, with how many these are."""
    why: Counter[str] = Counter()
    for setting in table["setting"]:
        if "left_out" in setting:
            why[setting["left_out"]] += len(setting["peaks"])
    yield from (f"{table['source']}, {count} rows: {reason}" for reason, count in why.items())


def _title(setting: Table, batch: str) -> str:
    if "title" in setting:
        return str(setting["title"].format(batch=batch))
    model = setting["model"].rpartition("/")[2]
    told = [f"{model}, {batch} x {setting['length']} tokens, {setting['dtype']}, adamw", setting["method"]]
    told += [f"framework {setting['framework']}"] if setting["framework"] != "none" else []
    told += [f"FSDP over {setting['gpus']}"] if setting["gpus"] > 1 else []
    return f"{'; '.join(told)}; gradient checkpointing"
