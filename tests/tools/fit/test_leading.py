"""What a fit looks at: nothing that a committed plan has is left out, and what is left out can be asked for."""

from __future__ import annotations

import json
from pathlib import Path

from actbench.model.records import Case
from actbench.scheme import build, find_schemes
from actbench.scheme.composed import parts_in
from actbench.tools.fit.plan import candidates_for

PLANS = Path(__file__).parents[3] / "results" / "plans" / "plans.json"
STEP = Case(model="tiny-llama", batch_size=256, meter="simulated")


def kinds(**settings: object) -> set[str]:
    return {choice.kind for choice in candidates_for(STEP, {}, **settings).all}  # type: ignore[arg-type]


def test_what_committed_plans_are_made_of_is_looked_at() -> None:
    plans = [row["plan"]["scheme"] for row in json.loads(PLANS.read_text())["rows"] if row["plan"]]
    used = {part.model_copy(update={"only": ()}).spec for plan in plans for part in parts_in(build(plan))}
    looked_at = {
        build(name + value).spec for name, scheme in find_schemes().items() for value in scheme.card.leading_for(256)
    }

    assert len(used) > 10
    assert used - looked_at == {"exact"}


def test_what_no_plan_has_is_tried_where_errors_are_limited_or_if_it_is_named() -> None:
    assert "gact" in kinds()
    assert "mesa" not in kinds()
    assert {"gact", "mesa"} <= kinds(limits_error=True)
    assert kinds(names=["mesa"]) == {"mesa"}
