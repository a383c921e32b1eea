"""Attributes and entries are as they were after a block, however their owner holds them."""

from __future__ import annotations

import pytest

from actbench.device.patches import Patches, attribute, entries


class Base:
    inherited = "base"


class Owner(Base):
    own = "own"


class Config:
    """Holds values elsewhere, and hides those that are deleted, as the configs of torch do."""

    def __init__(self) -> None:
        object.__setattr__(self, "held", {"threads": 8})

    def __getattr__(self, name: str) -> int:
        try:
            return vars(self)["held"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: int) -> None:
        vars(self)["held"][name] = value

    def __delattr__(self, name: str) -> None:
        del vars(self)["held"][name]


@pytest.mark.parametrize("name", ["own", "inherited", "new"])
def test_an_attribute_is_where_it_was(name: str) -> None:
    before = dict(vars(Owner))
    with attribute(Owner, name, "other"):
        assert getattr(Owner, name) == "other"
    assert dict(vars(Owner)) == before
    assert Owner.inherited == "base"


def test_what_a_config_holds_elsewhere_is_set_again() -> None:
    config = Config()
    with attribute(config, "threads", 1):
        assert config.threads == 1
    assert config.threads == 8


def test_a_mapping_is_as_before_whatever_was_changed() -> None:
    table = {"kept": 1, "changed": 2}
    with entries(table, {"changed": 3, "added": 4}):
        assert table == {"kept": 1, "changed": 3, "added": 4}
        table["by others"] = 5
    assert table == {"kept": 1, "changed": 2}


def test_patches_leave_out_what_an_owner_does_not_have() -> None:
    with Patches() as patches:
        patches.replace(Owner, own="other", missing="x")
        assert Owner.own == "other"
        assert not hasattr(Owner, "missing")
    assert Owner.own == "own"
