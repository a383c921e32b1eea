"""Runs the cells of a notebook as IPython does, without IPython: magics of cells, and the value of the last line."""

from __future__ import annotations

import ast
import importlib
import json
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Shell:
    """What extensions of IPython use of a shell.

    Attributes:
        user_ns: The names of the cells.
        magics: The magics of cells, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.user_ns: dict[str, Any] = {"__name__": "__main__"}
        self.magics: dict[str, Callable[[str, str], Any]] = {}
        self.compile = self
        self._folder, self._count = folder, 0

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        assert magic_kind == "cell"
        self.magics[magic_name] = function

    def transform_cell(self, text: str) -> str:
        return text if text.endswith("\n") else f"{text}\n"

    def cache(self, text: str) -> str:
        """Return the name of a file with the text, which is in the cache of lines alone."""
        self._count += 1
        name = str(self._folder / f"{self._count}.py")
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name

    def run(self, text: str) -> Any:
        """Run a cell and return the value of its last line."""
        if text.startswith("%%"):
            line, _, cell = text[2:].partition("\n")
            name, _, line = line.partition(" ")
            return self.magics[name](line, cell)
        lines = text.splitlines()
        for extension in [line.split()[1] for line in lines if line.startswith("%load_ext ")]:
            importlib.import_module(extension).load_ipython_extension(self)
        source = self.transform_cell("\n".join("" if line.startswith("%") else line for line in lines))
        tree = ast.parse(source, name := self.cache(source))
        last = tree.body[-1] if tree.body else None
        last = last if isinstance(last, ast.Expr) else None
        tree.body = tree.body if last is None else tree.body[:-1]
        exec(compile(tree, name, "exec"), self.user_ns)
        return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), self.user_ns)


def code_cells(notebook: Path) -> Iterator[str]:
    """Yield the text of each cell with code."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])
