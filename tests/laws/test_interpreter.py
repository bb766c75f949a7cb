"""P3: whatever the rules and the training, each path does what an interpreter of the rule language does by hand."""

from __future__ import annotations

import pytest
from drawn_trainings import Training, by_hand, check, trainings, under_rules
from fuzzing import examples
from hypothesis import HealthCheck, Phase, given, seed, settings
from ranks import Json


@pytest.mark.no_cover  # thousands of trainings, through lines that other tests cover
@pytest.mark.hypothesis  # the full suite draws all examples
@pytest.mark.parametrize("part", range(5))  # workers share them, and none takes ten minutes
def test_rules_do_what_the_interpreter_does(part: int) -> None:
    @seed(part)
    @settings(
        database=None,
        deadline=None,
        max_examples=examples(500, long=True),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(drawn=trainings())
    def held(drawn: tuple[list[Json], Training]) -> None:
        rules, training = drawn
        check(under_rules(rules, training), by_hand(rules, training))

    held()
