"""Who is alive, whatever else is."""

from __future__ import annotations

from typing import Any

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
