"""Write the pictures of the live view, a table, a flame graph and a notebook under docs/images.

``make screenshots`` writes them. The live view and the table are drawn by rich, without a browser; the other two are
pages that Chromium opens, and the notebook is run by nbconvert::

    .venv/bin/python benchmarks/screenshots.py            # all of them
    .venv/bin/python benchmarks/screenshots.py live       # one: live, table, flamegraph or notebook
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.text import Text

from actbench.model.live import LiveMemory
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.run.isolated import IsolatedSession
from actbench.run.memorypanel import SeenMemory, memory_panel
from actbench.run.processes import ForkServer
from actbench.tools.script.declared import BENCH
from actbench.units import format_seconds

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SCRIPT, CARD = "examples/train.py", "rtx-4060"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS = 104
README_COMMAND = re.compile(r"^```\n(actbench measure .*?)^```$", re.MULTILINE | re.DOTALL)


def live() -> None:
    """Draw the view of ``actbench run --live`` as it is when the script's memory has reached its peak."""
    told: list[tuple[float, LiveMemory]] = []
    case = Case(model=SCRIPT, batch_size=1, device_profile=CARD, meter="simulated", script=Script(target=SCRIPT))
    printed = tempfile.mkdtemp()  # for what the script prints
    for name in ("out", "err"):
        (Path(printed) / name).touch()
    with ForkServer(BENCH) as server, IsolatedSession(server, case, 600.0, printed=printed, is_live=True) as session:
        began = time.monotonic()
        session.reported = lambda report: told.append((round(time.monotonic() - began), report))
        session.memory()
    shutil.rmtree(printed)
    second = next(place for place, (_, each) in enumerate(told) if each.step == 2 and each.phase is not None)
    last = max(range(second, len(told)), key=lambda place: told[place][1].live_bytes)
    seen = SeenMemory()
    for _, report in told[: last + 1]:
        seen.add(report)
    panel = memory_panel(case.shown_model, seen, COLUMNS, elapsed=format_seconds(told[last][0]))
    _draw("live", f"actbench run --live --device-profile {CARD} {SCRIPT}", panel)


def table() -> None:
    """Draw the table of the README's second command as a terminal shows it, without the notes below it."""
    command = README_COMMAND.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert command is not None
    words = [*shlex.split(command[1].replace("\\\n", " ")), "--quiet"]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        check=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    shown = Text.from_ansi(done.stdout.partition("\n\x1b[2m")[0].rstrip())  # notes are dim
    _draw("table", " ".join(words[:3]) + " …", shown)


def _draw(name: str, title: str, shown: RenderableType) -> None:
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True)
    console.print(shown)
    drawing = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # a picture loads no fonts
    (IMAGES / f"{name}.svg").write_text(console.export_svg(title=title, code_format=drawing, unique_id=name) + "\n")


def flamegraph() -> None:
    """Open a flame graph in a browser, as it is at the peak."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak.html"
        command = ["run", "--quiet", "--device-profile", CARD, "--export-flamegraph", str(file), SCRIPT]
        subprocess.run([sys.executable, "-m", "actbench", *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        with _Page(file, 1100, 500) as page:
            page.screenshot(path=IMAGES / "flamegraph.png")


def notebook() -> None:
    """Run the example's notebook, and open it as far as its first simulation."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nbconvert", "--to", "html", "--execute", "--output-dir", folder, "examples/notebook.ipynb"]
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
        with _Page(Path(folder) / "notebook.html", 1000, 900) as page:
            cell = page.locator(".jp-Cell", has_text="%%actbench rtx-4090").first
            cell.scroll_into_view_if_needed()
            cell.screenshot(path=IMAGES / "notebook.png")


class _Page:
    """A page in Chromium, which asks no network."""

    def __init__(self, file: Path, width: int, height: int) -> None:
        self._file = file
        self._size: Any = {"width": width, "height": height}

    def __enter__(self) -> Any:
        from playwright.sync_api import sync_playwright

        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
        self._driver = sync_playwright().start()
        self._browser = self._driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = self._browser.new_page(viewport=self._size, device_scale_factor=1.5)
        page.route("http*://**", lambda route: route.abort())
        page.goto(self._file.as_uri())
        return page

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._driver.stop()


PICTURES = {"live": live, "table": table, "flamegraph": flamegraph, "notebook": notebook}


def main() -> None:
    """Write the pictures that are named, or all."""
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
