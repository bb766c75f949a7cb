"""Who is alive, whatever else is."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest

from gradsurgeon.common import _live


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


def test_a_search_leaves_tuples_that_other_threads_build_alone() -> None:
    """Python resizes a tuple that is being built only while nobody else refers to it."""
    errors: list[str] = []
    built = [0, 0, 0]
    done = threading.Event()

    def build(who: int) -> None:
        while not done.is_set():
            try:
                tuple(str(number) for number in range(10 * 10**who))
            except SystemError as error:
                errors.append(str(error))
                return
            built[who] += 1

    threads = [threading.Thread(target=build, args=(who,)) for who in range(len(built))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            before = sum(built)
            _live.instances(Base)
            while sum(built) == before and not errors:
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert min(built) > 0


def test_a_search_keeps_nothing_of_what_it_has_seen() -> None:
    seen = Odd()
    before = sys.getrefcount(seen)
    enabled = gc.isenabled()
    gc.disable()
    try:
        _live.instances(Base)
        assert sys.getrefcount(seen) == before
    finally:
        (gc.enable if enabled else gc.disable)()


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
