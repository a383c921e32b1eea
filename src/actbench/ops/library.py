"""The one operator namespace of the package, ``torch.ops.actbench``.

Operators are made with ``define`` and ``impl``: the decorators cost two to four times as much per call, and that cost
would be part of every figure that is published.
"""

from __future__ import annotations

import torch

library = torch.library.Library("actbench", "DEF")  # type: ignore[no-untyped-call]  # registrations live as long
