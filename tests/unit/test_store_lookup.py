"""Asking records by name: the same answers and errors in a session and in a run."""

from __future__ import annotations

from array import array

import pytest

from gradsurgeon import RecordError
from gradsurgeon.records.store import Key, Lookup, Records

KNOWN = ("a.weight", "b.weight", "c.weight")
ALIASES = {"tied.weight": "a.weight"}
LOGGED = {
    "norms": (("l2",), {"a.weight", "b.weight"}),
    "other": (("l2", "max"), {"b.weight"}),
}


def values(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def make() -> Lookup:
    records = Records()
    key = Key("norms", "l2", "accumulated", ("a.weight", "b.weight"))
    records.add(key, 0, values(1.0, 2.0))
    records.add(key, 1, values(3.0, 0.0), frozenset({1}))
    records.add(Key("other", "max", "step", ("b.weight",)), 0, values(9.0))
    return Lookup(KNOWN, ALIASES, LOGGED, records.series)


def test_history_and_latest_by_name_and_alias() -> None:
    assert (
        make().history("a.weight", "l2", None)
        == make().history("tied.weight", "l2", None)
        == [(0, 1.0), (1, 3.0)]
    )
    assert make().latest("tied.weight", "l2", None) == 3.0
    assert make().latest("b.weight", "max", None) == 9.0


def test_the_latest_passes_over_steps_without_a_gradient() -> None:
    assert make().latest("b.weight", "l2", None) == 2.0


@pytest.mark.parametrize("ask", [Lookup.history, Lookup.latest])
def test_both_say_what_there_is_instead(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(KeyError, match=r"no parameter 'a.weigth' in the model; nearest: a.weight,"):
        ask(make(), "a.weigth", "l2", None)
    with pytest.raises(KeyError, match=r"no parameter 'xyz' in the model; nearest: .*weight"):
        ask(make(), "xyz", "l2", None)
    with pytest.raises(RecordError, match=r"no rule records max of a.weight; recorded: norms: l2"):
        ask(make(), "a.weight", "max", None)
    with pytest.raises(
        RecordError, match=r"no rule 'norm' records l2 of a.weight; recorded: norms: l2"
    ):
        ask(make(), "a.weight", "l2", "norm")
    with pytest.raises(
        RecordError, match=r"no rule records l2 of c.weight; recorded: nothing: a rule \{"
    ):
        ask(make(), "c.weight", "l2", None)


def test_what_has_not_come_yet_has_no_latest_and_an_empty_history() -> None:
    assert make().history("b.weight", "l2", "other") == []
    with pytest.raises(RecordError, match=r"l2 of b.weight has not been recorded yet"):
        make().latest("b.weight", "l2", "other")


def test_several_rules_are_named() -> None:
    records = Records()
    for rule in ("other", "norms"):
        records.add(Key(rule, "l2", "step", ("b.weight",)), 0, values(1.0))
    lookup = Lookup(KNOWN, ALIASES, LOGGED, records.series)
    message = r"l2 of b.weight is recorded by several rules: pass rule= one of norms, other"
    with pytest.raises(RecordError, match=message):
        lookup.latest("b.weight", "l2", None)
    assert lookup.latest("b.weight", "l2", "other") == 1.0


def test_of_two_series_the_later_step_stands_and_of_one_step_the_later_series() -> None:
    records = Records()
    first, second = (Key("norms", "l2", "step", names) for names in (("a", "b"), ("a",)))
    records.add(second, 5, values(5.0))
    records.add(first, 3, values(3.0, 3.0))
    lookup = Lookup(("a", "b"), {}, {}, records.series)
    assert lookup.latest("a", "l2", None) == lookup.history("a", "l2", None)[-1][1] == 5.0
    records.add(first, 5, values(7.0, 7.0))
    assert lookup.latest("a", "l2", None) == lookup.history("a", "l2", None)[-1][1] == 7.0
