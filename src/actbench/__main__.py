from __future__ import annotations

from actbench.cli import main

main()
