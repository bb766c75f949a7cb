"""Who is alive, whatever else is."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from gradsurgeon import _live


class Base:
    """What is looked for."""


class Derived(Base):
    """Is one."""


class Unhashable(type):
    """Of classes that are in no set."""

    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=Unhashable):
    """Such a class."""


class Proxy:
    """Claims to be something else."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Derived


def test_objects_of_a_class_and_of_derived_ones_are_found_and_no_others() -> None:
    made = [Base(), Derived(), Derived()]
    others = [Odd(), Proxy()]
    assert isinstance(others[1], Base)
    found = _live.instances(Base)
    assert sorted(map(id, found)) == sorted(map(id, made))
    assert _live.instances(Derived) == made[1:]


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_left_as_it_was(*, on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KeyError), _live.uncollected():
            assert not gc.isenabled()
            with _live.uncollected():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
