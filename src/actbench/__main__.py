from __future__ import annotations

import sys

if not sys.flags.safe_path:  # without that flag, python -m puts the current folder first on sys.path
    del sys.path[0]

from actbench.cli import main

main()
