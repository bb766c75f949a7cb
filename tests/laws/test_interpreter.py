"""P3: whatever the rules and the training, each path does what an interpreter of the rule language does by hand."""

from __future__ import annotations

from typing import Any

import torch
from drawn_trainings import Outcome, Training, by_hand, trainings, under_rules
from fuzzing import examples
from hypothesis import HealthCheck, Phase, given, settings


def check(found: Outcome, expected: Outcome) -> None:
    """Compare all that two trainings have left."""
    assert found.stopped == expected.stopped
    assert found.records.keys() == expected.records.keys()
    for key, rows in expected.records.items():
        assert [step for step, _ in found.records[key]] == [step for step, _ in rows], key
        values = [torch.tensor([value for _, value in one]) for one in (found.records[key], rows)]
        close(values[0], values[1], key)
    assert found.captured.keys() == expected.captured.keys()
    for call, kept in expected.captured.items():
        close(found.captured[call], kept, call)
    for name, weight in expected.weights.items():
        close(found.weights[name], weight, name)
    for state, other in zip(found.states, expected.states, strict=True):
        assert state.keys() == other.keys()
        for of, value in other.items():
            close(state[of], value, of)


def close(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(
        found, expected, rtol=2e-4, atol=1e-6, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(2500),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(drawn=trainings())
def test_rules_do_what_the_interpreter_does(drawn: tuple[list[dict[str, Any]], Training]) -> None:
    rules, training = drawn
    check(under_rules(rules, training), by_hand(rules, training))
