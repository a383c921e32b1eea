"""The panels that ``--help`` groups the flags of a verb in, the common ones first."""

from __future__ import annotations

PANELS = {
    "What is trained": (
        "--batch-size --sequence-length --image-size --dtype --autocast --optimizer --task --attention --weights "
        "--trust-remote-code --seed"
    ),
    "Which schemes": "--scheme --cumulative --gelu-bits --activation-bits --linear --max-slowdown --exact",
    "How it is measured": (
        "--meter --device-profile --memory-limit --max-batch --require-fit --measure --device --steps --seconds "
        "--time-by --timeline --ledger --top --all"
    ),
    "How it is run": (
        "--seeds --jobs --timeout --budget --force --retry-failed --cluster --gpus-per-case "
        "--cores-per-run --resources --checkpoints --checkpoint-seconds --trust-recipe --dry-run"
    ),
    "What is written": (
        "--output --columns --code --export-markdown --export-csv --export-html --export-json --export-curves "
        "--export-timeline --export-snapshot"
    ),
}
"""By title of a panel the names of its flags, in the order that they are shown in."""

_PLACES = {
    name: (panel, place) for panel, text in enumerate(PANELS.values()) for place, name in enumerate(text.split())
}


def panel_of(name: str) -> str | None:
    """Return the title of the panel of a flag; None for one that only a short list of flags holds."""
    return list(PANELS)[_PLACES[name][0]] if name in _PLACES else None


def place_of(name: str) -> tuple[int, int]:
    """Return where a flag stands in a help page; arguments stand before, and flags without a panel after all others."""
    return _PLACES.get(name, (len(PANELS), 0))
