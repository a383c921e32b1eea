"""The line of code that uses a scheme in a script."""

from __future__ import annotations

from actbench import scheme as schemes
from actbench.scheme.composed import Composed
from actbench.scheme.facets import OwnOptimizer


def line_for(spec: str, optimizer: str | None) -> str:
    """Return a line of Python to paste where a script makes its model, or its optimizer.

    Args:
        spec: A scheme.
        optimizer: The class of the script's optimizer.
    """
    scheme = schemes.build(spec)
    own = None if isinstance(scheme, Composed) else scheme.facet(OwnOptimizer)
    if own is None:
        return f'model = actbench.convert(model, "{spec}")'
    kind = "Adam" if optimizer == "Adam" else "AdamW"
    code = own.code.replace("{kind}", kind).replace("{rate}", "lr").replace("(trained,", "(model.parameters(),")
    return f"optimizer = {code.replace('{}', 'optimizer')}"
