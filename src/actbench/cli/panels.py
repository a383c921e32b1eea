"""The panels of flags in ``--help``, the common ones first."""

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
"""The names of flags by the title of their panel, in the order of the help page."""

_PLACES = {
    name: (panel, place) for panel, text in enumerate(PANELS.values()) for place, name in enumerate(text.split())
}


def panel_of(name: str) -> str | None:
    """Return the title of a flag's panel, or None; flags without a panel are in verbs with few flags."""
    return list(PANELS)[_PLACES[name][0]] if name in _PLACES else None


def place_of(name: str) -> tuple[int, int]:
    """Return the position of a flag in a help page; flags without a panel come last."""
    return _PLACES.get(name, (len(PANELS), 0))
