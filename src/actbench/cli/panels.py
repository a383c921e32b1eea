"""The panels that hold options in ``--help``."""

from __future__ import annotations

from actbench.model.declared.schemes import shorthands

PANELS = {
    "What is trained": (
        "--batch-size --sequence-length --target-length --packed --image-size --dtype --autocast --optimizer --task "
        "--infer --generate --cache --attention --weights --trust-remote-code --seed --module --script"
    ),
    "Which schemes": (
        f"--scheme --base --cumulative --no-exact {' '.join(each.flag for each in shorthands())} --max-slowdown "
        "--max-gradient-error --exact"
    ),
    "How it is measured": (
        "--meter --device-profile --torch-era --no-workspaces --memory-limit --gpus --max-batch --longest-sequence "
        "--largest-batch --which-card --processes --require-fit --measure --device --steps --seconds --whole "
        "--full-answer --raise-oom --time-by --timeline --ledger --top --all"
    ),
    "How it is run": (
        "--seeds --jobs --timeout --budget --force --retry-failed --cluster --gpus-per-case "
        "--resources --checkpoint-seconds --trust-recipe --dry-run --probe --live --quiet --verbose"
    ),
    "What is written": (
        "--output --columns --code --export-markdown --export-csv --export-html --export-json --export-latex "
        "--export-curves --export-timeline --export-flamegraph --export-speedscope --export-perfetto --export-snapshot "
        "--export-trace"
    ),
}
"""The names of flags by the title of their panel, in the order of the help page."""

WITHOUT_PANEL = (
    "--help --help-all --version --debug --title --fail-on --format --export-junit --encoding --distribution "
    "--elements --prompt"
)
"""The other flags, of verbs with few, which write tables: no plug-in's export can have their names."""

_PLACES = {
    name: (panel, place) for panel, text in enumerate(PANELS.values()) for place, name in enumerate(text.split())
}


def panel_of(name: str) -> str | None:
    """Return the title of a flag's panel, or None; flags without a panel are in verbs with few flags."""
    panel, _ = place_of(name)
    return list(PANELS)[panel] if panel < len(PANELS) else None


def place_of(name: str) -> tuple[int, int]:
    """Return the position of a flag in a help page: those without a panel are last."""
    is_export = name.startswith("--export-")  # of a plug-in: behind the others
    return _PLACES.get(name, (len(PANELS) - 1, len(_PLACES)) if is_export else (len(PANELS), 0))
