"""Ranks with models of their own: what a rule matches is counted over all, decisions are those of a group."""

from __future__ import annotations

import pytest
from distributed.groups_worker import FAULT, STEPS
from ranks import Ranks

RANKS = 4
pytestmark = [pytest.mark.slow, pytest.mark.cover_children]


def test_a_rule_for_the_stage_of_other_ranks_is_a_notice(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        told = (
            []
            if number < 2
            else [["notice", "calm", f"matches nothing on rank {number}; ranks 0, 1 have it"]]
        )
        assert rank["elsewhere"] == {"refused": "", "events": told}


def test_a_rule_that_matches_nowhere_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        refused = rank["nowhere"]["refused"]
        assert 'rule calm: no parameter of the model matches "frist.*"' in refused
        assert refused.endswith("(on all ranks together: 0)")
    assert 'did you mean "first.*" (it matches 2)?' in ranks[0]["nowhere"]["refused"]


def test_what_is_expected_is_counted_over_all_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["expected"]["refused"] == ""
        assert "on all ranks together: 4" in rank["not expected"]["refused"]


def test_a_rank_that_asks_in_vain_decides_alone(ranks: Ranks) -> None:
    found = ranks[0]["asked by one"]
    assert found["refused"].endswith(
        "(on all ranks together: 0; nothing heard of rules on ranks 1, 2, 3 within 0.5 s)"
    )


def test_groups_decide_by_themselves(ranks: Ranks) -> None:
    runs = [rank["groups"] for rank in ranks]
    assert runs[0]["weights"] == runs[1]["weights"]
    assert runs[2]["weights"] == runs[3]["weights"]
    for number, run in enumerate(runs):
        steps = [run["weights"][step] == run["weights"][step - 1] for step in range(1, STEPS)]
        assert steps == [number < 2 and step == FAULT for step in range(1, STEPS)]
    for run in runs[:2]:
        assert run["events"] == [["trap", FAULT], ["skipped-step", FAULT]]
    assert runs[2]["events"] == runs[3]["events"] == []
