"""Asking records by name: the same answers and errors in a session and in a run."""

from __future__ import annotations

from array import array

import pytest
from runs import add

from gradsurgeon import RecordError
from gradsurgeon.records.store import Key, Lookup, RecordQueries, Records

KNOWN = ("a.weight", "b.weight", "c.weight")
ALIASES = {"tied.weight": "a.weight"}
LOGGED = {
    "norms": (("l2",), {"a.weight", "b.weight"}),
    "other": (("l2", "max"), {"b.weight"}),
}


def values(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


class Asked(RecordQueries):
    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup

    def _lookup(self) -> Lookup:
        return self.lookup


def make() -> Asked:
    records = Records()
    key = Key("norms", "l2", "accumulated", ("a.weight", "b.weight"))
    add(records, key, 0, values(1.0, 2.0))
    add(records, key, 1, values(3.0, 0.0), frozenset({1}))
    add(records, Key("other", "max", "step", ("b.weight",)), 0, values(9.0))
    return Asked(Lookup(KNOWN, ALIASES, LOGGED, records.series))


def test_the_latest_passes_over_steps_without_a_gradient() -> None:
    assert make().latest("b.weight", "l2") == 2.0


@pytest.mark.parametrize("ask", [Asked.history, Asked.latest])
def test_both_say_what_there_is_instead(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(KeyError, match=r"no parameter 'a.weigth' in the model; nearest: a.weight,"):
        ask(make(), "a.weigth", "l2")
    with pytest.raises(KeyError, match=r"no parameter 'xyz' in the model; nearest: .*weight"):
        ask(make(), "xyz", "l2")
    with pytest.raises(RecordError, match=r"no rule records max of a.weight; recorded: norms: l2"):
        ask(make(), "a.weight", "max")
    with pytest.raises(
        RecordError, match=r"no rule 'norm' records l2 of a.weight; recorded: norms: l2"
    ):
        ask(make(), "a.weight", "l2", rule="norm")
    with pytest.raises(
        RecordError, match=r"no rule records l2 of c.weight; recorded: nothing: a rule \{"
    ):
        ask(make(), "c.weight", "l2")


def test_of_two_series_the_later_step_stands_and_of_one_step_the_later_series() -> None:
    records = Records()
    first, second = (Key("norms", "l2", "step", names) for names in (("a", "b"), ("a",)))
    add(records, second, 5, values(5.0))
    add(records, first, 3, values(3.0, 3.0))
    lookup = Asked(Lookup(("a", "b"), {}, {}, records.series))
    assert lookup.latest("a") == lookup.history("a")[-1][1] == 5.0
    add(records, first, 5, values(7.0, 7.0))
    assert lookup.latest("a") == lookup.history("a")[-1][1] == 7.0
