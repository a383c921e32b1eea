from __future__ import annotations

from actbench import workload as workloads
from actbench.workload import names


def test_every_listed_model_is_understood_by_its_name() -> None:
    listed = workloads.available()

    assert {entry.source for entry in listed} == {"preset", "torchvision"}
    assert all(names.parse_model_name(entry.spec).name == entry.spec for entry in listed)
    assert len({entry.spec for entry in listed}) == len(listed) >= 100
    assert all(entry.task != "auto" and entry.note for entry in listed)
