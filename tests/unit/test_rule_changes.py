"""Which change of an option makes a rule stricter: what the fields of its action say."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

import pytest

from gradsurgeon import SpikeTrap
from gradsurgeon.actions import FreezeRule, Options, Stricter, known_actions
from gradsurgeon.review.rule_changes import changed_options


class Above(Options):
    sigmas: Annotated[float, Stricter(operator.neg, "bites sooner", "bites later")] = 2.5
    beta: float = 0.97


class Dampen(FreezeRule):
    """An action that the package does not know: what it says of its options is all there is."""

    action: Literal["dampen"] = "dampen"
    strength: Annotated[float, Stricter(operator.pos)]
    above: Above = Above()
    kinds: tuple[str, ...] = ()


del known_actions["dampen"]  # tests of messages list the actions


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"strength": 2.0}, {"strength": 3.0}, [("strength", "tightened", "")]),
        ({"strength": 2.0}, {"strength": 1.0}, [("strength", "loosened", "")]),
        ({"above": {"sigmas": 2.0}}, {"above": {}}, [("above.sigmas", "loosened", "bites later")]),
        (
            {"above": {"sigmas": 2.0}},
            {"above": {"sigmas": 4.0, "beta": 0.5}},
            [("above.sigmas", "loosened", "bites later"), ("above.beta", "changed", "")],
        ),
        ({"kinds": ("a", "b")}, {"kinds": ("b", "a")}, []),
        ({"kinds": ("a",)}, {"kinds": ("b",)}, [("kinds", "changed", "")]),
    ],
)
def test_options_say_themselves_which_value_is_stricter(
    old: Any, new: Any, expected: list[tuple[str, str, str]]
) -> None:
    rules = [
        Dampen.model_validate({"id": "it", "params": "*", "strength": 2.0, **options})
        for options in (old, new)
    ]
    found = [(one.name, one.direction, one.meaning) for one in changed_options(*rules)]
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # The one measure cannot be compared with the other.
        (
            {"above": {"sigmas": 2.5}},
            {"above": {"times": 3}},
            [("above.sigmas", "changed"), ("above.times", "changed")],
        ),
        ({"above": {"times": 3}}, {"above": {"times": 2}}, [("above.times", "changed")]),
        ({}, {"give_up_after": 20}, [("give_up_after", "changed")]),
    ],
)
def test_bounds_of_spikes_have_no_order(
    old: Any, new: Any, expected: list[tuple[str, str]]
) -> None:
    common = {"id": "it", "params": "*", "above": {"sigmas": 2.5}, "then": "skip-step"}
    rules = [SpikeTrap.model_validate({**common, **options}) for options in (old, new)]
    assert [(one.name, one.direction) for one in changed_options(*rules)] == expected
