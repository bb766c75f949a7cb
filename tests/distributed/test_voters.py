"""Votes in the store: the same decision on all ranks, whoever reads it when, whoever is late."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.voters_worker import OBJECTED, PASSES
from ranks import Ranks, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]
RANKS = 4


@pytest.mark.parametrize("how", ["by ranks", "by hosts"])
def test_all_ranks_read_the_same(ranks: Ranks, how: str) -> None:
    for number, rank in enumerate(ranks):
        decisions = rank[how]["decisions"]
        assert len(decisions) == (PASSES if number == 2 else PASSES // 2)
        for at, decision in decisions.items():
            objecting = OBJECTED.get(int(at), ())
            assert decision == [
                [[one, f"pass {at}"] for one in objecting],
                len(objecting) == len(ranks),
            ]
        assert rank[how]["earlier"] == [[], False]
        assert rank[how]["said"] == []


def test_one_rank_of_each_host_serves_it(ranks: Ranks) -> None:
    assert [rank["by ranks"]["serves"] for rank in ranks] == [False] * 4
    assert [rank["by hosts"]["serves"] for rank in ranks] == [True, False, True, False]


def test_a_decision_can_be_read_when_the_rank_that_serves_the_host_has_left(
    ranks: Ranks,
) -> None:
    for rank in (ranks[1], ranks[3]):
        assert rank["leaving"] == {"decision": [[[3, "pass 1"]], False], "said": []}


@pytest.mark.parametrize("how", ["by ranks", "by hosts"])
def test_the_store_does_not_fill_up(ranks: Ranks, how: str) -> None:
    for rank in ranks:
        earlier, later = rank[how]["keys"]
        assert later <= earlier


def test_a_vote_that_comes_too_late_is_none(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        first, second, third = rank["late"]["decisions"]
        # What was decided without rank 3, it obeys; the next pass is decided by all.
        assert first == second == [[], False]
        assert third == [[[3, "pass 3"]], False]
        said = rank["late"]["said"]
        assert len(said) == (number != 3)
        for text in said:
            assert text == (
                "1 of 4 ranks did not vote on this update within 1 s: the update takes place, on all ranks"
            )


def test_ranks_that_meet_know_who_has_come(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        assert rank["met"]["all"] == [[one, {"of": one}] for one in range(4)]
        # Who comes when the door is closed learns who was there.
        assert rank["met"]["some"] == [[0, 0], [1, 1], [2, 2]], number


def test_the_host_of_the_store_stays_until_the_others_have_read(
    ranks: Ranks,
) -> None:
    for rank in ranks[1:]:
        assert rank["left"] == {"first": [[[3, "pass 1"]], False], "later": [], "said": []}


def test_a_store_that_is_gone_ends_the_votes_with_a_word(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("voters_worker.py")
    ranks = run_ranks(worker, tmp_path / "killed", RANKS, ("killed",))
    for rank in ranks[1:]:
        assert rank["left"]["later"][-1] is None
        (text,) = rank["left"]["said"]
        assert text.startswith("the key-value store of the job failed (Dist")
        assert text.endswith("): from now on each rank raises if one of its own traps trips")
