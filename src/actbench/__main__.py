from __future__ import annotations

import sys

if not sys.flags.safe_path:  # then python -m has put the current folder first
    del sys.path[0]

from actbench.cli import main

main()
