"""What one request enters of the source: calls, functions and files at run time, and the modules that it imports.

python benchmarks/walks.py [NAME…]      each walk in a process of its own, after torch is imported where it needs torch
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PREPARE_MODEL = """
import torch
from torch import nn
import actbench
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
"""
WALKS = {
    "check a specification": (
        "from actbench.model.declared import check_scheme",
        "check_scheme('fewbit:3+randomized:0.2')",
    ),
    "convert three layers": (PREPARE_MODEL, "actbench.convert(model, 'fewbit:3+randomized:0.2')"),
    "simulate a case": (
        "import torch\nimport actbench",
        "actbench.measure(actbench.Case(model='resnet18', batch_size=8))",
    ),
    "simulate a script of six lines": (
        "import torch\nfrom torch import nn\nimport actbench",
        """with actbench.simulate('rtx-4090'):
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()""",
    ),
}


def walk(prepare: str, request: str) -> dict[str, int]:
    """Run a request, and count the calls of functions of the source in all threads."""
    import actbench

    root = str(Path(actbench.__file__).parent)
    counted: dict[tuple[str, str, int], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or of a class
        if event == "call" and is_function and code.co_filename.startswith(root):
            key = (code.co_filename, code.co_qualname, code.co_firstlineno)
            counted[key] = counted.get(key, 0) + 1

    scope: dict[str, Any] = {"__name__": "walk"}
    exec(compile(prepare, "prepare", "exec"), scope)
    before = {name for name in sys.modules if name.startswith("actbench")}
    compiled = compile(request, "request", "exec")
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        exec(compiled, scope)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    modules = {name for name in sys.modules if name.startswith("actbench")}
    if "--files" in sys.argv:
        print(*sorted({key[0][len(root) + 1 :] for key in counted}), sep="\n", file=sys.stderr)
    return {
        "calls": sum(counted.values()),
        "functions": len(counted),
        "files": len({file for file, *_ in counted}),
        "modules": len(modules),
        "modules then": len(modules - before),
        "schemes": len({name for name in modules if name.startswith("actbench.methods.") and name.count(".") == 2}),
    }


def main(names: list[str]) -> None:
    """Print the walks as a Markdown table."""
    keys = ("calls", "functions", "files", "modules", "modules then", "schemes")
    print(f"| walk | {' | '.join(keys)} |\n| --- |{' ---: |' * len(keys)}")
    for name in names:
        found = subprocess.run(
            [sys.executable, __file__, "--one", name, *(["--files"] if "--files" in sys.argv else [])],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        read = json.loads(found.splitlines()[-1])
        print(f"| {name} | {' | '.join(f'{read[key]:,}' for key in keys)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(walk(*WALKS[sys.argv[2]])))
    else:
        main([name for name in sys.argv[1:] if not name.startswith("--")] or list(WALKS))
