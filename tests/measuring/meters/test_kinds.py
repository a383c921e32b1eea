from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from actbench import plugins
from actbench.errors import MeasurementError, RecipeError
from actbench.measuring import meters
from actbench.measuring.meters import MeterKind
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.model.records import Case
from actbench.run.recipes import Recipe

THEIRS = MeterKind(lambda case: CpuMeter(123))


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a meter of another package, and one that cannot be imported."""
    found = dict(plugins.installed("meters"))
    for name, value in (("theirs", f"{__name__}:THEIRS"), ("broken", "nowhere:METER")):
        found[name] = plugins.Plugin(name, EntryPoint(name, value, "actbench.meters"))
    monkeypatch.setattr(plugins, "installed", lambda group: found)
    monkeypatch.setattr(
        plugins, "_imported", lambda plugin: (THEIRS, None) if plugin.name == "theirs" else (None, "no")
    )
    monkeypatch.setattr(plugins, "leave_out", lambda *_: None)


def case(meter: str) -> Case:
    return Case(model="resnet18", batch_size=1).model_copy(update={"meter": meter})


@pytest.mark.usefixtures("theirs")
def test_a_meter_of_another_package_measures_by_its_name() -> None:
    meters.check_meter("theirs")

    assert meters.open_meter(case("theirs")).memory_bytes == 123


@pytest.mark.usefixtures("theirs")
def test_a_meter_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(MeasurementError, match="--meter broken: no installed package brings this meter"):
        meters.check_meter("broken")


def test_a_meter_that_nobody_brings_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(RecipeError, match="stopwatch"):
        Recipe.from_flags({"models": ["tiny-bert"]}, {"meters": ["stopwatch"]})
    with pytest.raises(MeasurementError, match="--meter stopwatch: no installed package brings this meter"):
        meters.open_meter(case("stopwatch"))


def test_records_of_a_meter_that_is_not_installed_here_are_read() -> None:
    assert Case.model_validate_json('{"model": "resnet18", "batch_size": 1, "meter": "watts"}').meter == "watts"
