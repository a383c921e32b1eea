"""The line of code that uses a scheme in a script."""

from __future__ import annotations

from actbench import schemes


def line_for(spec: str, optimizer: str | None) -> str:
    """Return a line of Python to paste where a script makes its model, or its optimizer.

    Args:
        spec: A scheme.
        optimizer: The class of the script's optimizer.
    """
    scheme = schemes.build(spec)
    code = scheme.in_trainer(batch_size=1).optimizer
    if "optimizer" not in scheme.changes or not code:
        return f'model = actbench.convert(model, "{spec}")'
    kind = "Adam" if optimizer == "Adam" else "AdamW"
    code = code.replace("{kind}", kind).replace("{rate}", "lr").replace("(trained,", "(model.parameters(),")
    return f"optimizer = {code.replace('{}', 'optimizer')}"
