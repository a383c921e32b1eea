"""Texts that name code: ``file.py:function`` and ``module:attribute``, wherever they stand in a value.

Files that others wrote (settings, recipes, folders of converted models) are asked for it before anything that they name
is imported.
"""

from __future__ import annotations

import re

from actbench import plugins

# from where a word begins: to look from each of its letters takes minutes where a word is long
_FILE = re.compile(r"(?<![^\s,=+])[^\s,=+]*\.py[cw]?:[A-Za-z_]\w*", re.IGNORECASE)
_MODULE = re.compile(r"(?<![\w.:])[A-Za-z_]\w*(?:\.\w+)+:[A-Za-z_]\w*")
_BARE_MODULE = re.compile(r"(?<![\w.:])[A-Za-z_]\w*:[A-Za-z_]\w*")
_HEAD = re.compile(r"\s*([\w-]+)(?:[:@,]|\s*$)")  # NAME of NAME:VALUE,key=value and of NAME@key=value


def named_code(text: str, *, is_ours: bool = True) -> tuple[str, ...]:
    """Return the code that a value names: a specification of schemes, a model, or any other text.

    The form alone decides, so that options and parameters of plug-ins are judged like actbench's own. ``word:word``
    without a dot is a module only where a plug-in of another package reads it: actbench's own schemes take such words
    for other things (``encode:fp8:e4m3``) and import nothing by a name.

    Args:
        text: The value.
        is_ours: Whether what reads a part without the name of a scheme or network is actbench's own.
    """
    found: list[str] = []
    for part in text.split("+"):
        found += _FILE.findall(part)
        rest = _FILE.sub(" ", part)
        found += _MODULE.findall(rest)
        head = _HEAD.match(rest)
        reader = head and (plugins.installed("schemes") | plugins.installed("workloads")).get(head[1])
        if head and reader and not reader.is_ours:
            found += _BARE_MODULE.findall(rest[head.end() :])
        elif not reader and not is_ours:
            found += _BARE_MODULE.findall(rest)
    return tuple(dict.fromkeys(found))
