"""The lines of code that use schemes in a script."""

from __future__ import annotations

from actbench import scheme as schemes
from actbench.scheme.composed import parts_in
from actbench.scheme.facets import OwnOptimizer

_LONGEST_LINE = 80


def literal(spec: str, indent: str = "") -> str:
    """Return a specification as a text in Python; a long one has a line for each scheme."""
    if len(spec) <= _LONGEST_LINE:
        return f'"{spec}"'
    first, *others = spec.split("+")
    lines = [f'"{first}"', *(f'"+{each}"' for each in others)]
    return "".join(f"\n{indent}    {line}" for line in lines) + f"\n{indent}"


def lines_for(spec: str, optimizer: str | None) -> list[str]:
    """Return lines of Python to paste: one where a script makes its model, and one after its optimizer is made.

    Args:
        spec: A scheme, or several.
        optimizer: The class of the script's optimizer.
    """
    parts = [(part, part.facet(OwnOptimizer)) for part in parts_in(schemes.build(spec))]
    of_model = "+".join(filter(None, (part.spec if own is None else own.of_model for part, own in parts)))
    kind = "Adam" if optimizer == "Adam" else "AdamW"
    lines = [f"model = actbench.convert(model, {literal(of_model)})"] if of_model else []
    for code in (own.code for _, own in parts if own is not None):
        code = code.replace("{kind}", kind).replace("{rate}", "lr").replace("(trained,", "(model.parameters(),")
        lines.append(f"optimizer = {code.replace('{}', 'optimizer')}")
    return lines
