"""A keyword that a public function does not take is one error of actbench, which names the closest."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import actbench

FUNCTIONS = [name for name in actbench.__all__ if inspect.isfunction(getattr(actbench, name)) and name != "simulate"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_keyword_is_refused_with_those_that_exist(name: str) -> None:
    function: Any = getattr(actbench, name)
    parameters = inspect.signature(function).parameters.values()
    (*_, last) = (each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)
    given: dict[str, tuple[Any, ...]] = {"fit": (None,), "measure": ("tiny-bert",)}

    with pytest.raises(actbench.UsageError) as error:
        function(*given.get(name, ()), **{f"{last}x": 1}, **({"device_profile": "cpu"} if name == "fit" else {}))

    assert f"actbench.{name}: there is no keyword '{last}x'; did you mean {last}?" in str(error.value)


def test_functions_keep_their_names_and_signatures() -> None:
    from actbench.tools.convert.model import convert

    assert (actbench.convert.__doc__, actbench.convert.__name__) == (convert.__doc__, "convert")
    assert inspect.signature(actbench.convert) == inspect.signature(convert)


def test_fields_of_a_case_are_told_from_keywords() -> None:
    with pytest.raises(actbench.UsageError, match="no keyword 'scheme'"):
        actbench.measure("tiny-bert", scheme="checkpoint")  # type: ignore[call-arg, arg-type]
