"""Updates that a device decides on under DDP: all ranks leave one out alike, without votes and without a wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.device_worker import FAULT, LAST
from ranks import Json, Ranks, run_ranks

WORKER = Path(__file__).with_name("device_worker.py")
DECIDED = [
    "one rank, skip-step",
    "both ranks, skip-step",
    "accumulated",
    "excluded",
    "unused",
    "views",
    "asked",
]
PARTED = f"so ranks may have parted in step {FAULT}"


def test_random_trainings_are_those_that_wait(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["random"]["unlike"] == {}
        assert rank["random"]["late"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 252, 48))
def test_many_random_trainings_are_those_that_wait(tmp_path: Path, first: int) -> None:
    for rank in run_ranks(WORKER, tmp_path / "seen", words=[str(first), str(first + 48)]):
        assert rank["random"]["unlike"] == {}
        assert rank["random"]["late"] > 0


def is_skipped_alike(ranks: Ranks, kind: str) -> bool:
    """Return whether all ranks have left out the faulty update alone, and have equal weights."""
    wanted = [step != FAULT for step in range(LAST)]
    is_alike = ranks[0][kind]["weights"] == ranks[1][kind]["weights"]
    return is_alike and all(rank[kind]["moved"] == wanted for rank in ranks)


def told_of(rank: Json, kind: str, event: str) -> list[list[object]]:
    return [told[1:] for told in rank[kind]["told"] if told[0] == event]


@pytest.mark.parametrize("kind", DECIDED)
def test_all_ranks_leave_an_update_out_and_tell_it_before_the_next_one(
    ranks: Ranks, kind: str
) -> None:
    assert is_skipped_alike(ranks, kind)
    for rank in ranks:
        assert told_of(rank, kind, "trap") == [[FAULT, FAULT + 1]]
        assert told_of(rank, kind, "skipped-step") == [[FAULT, FAULT + 1]]
        assert told_of(rank, kind, "notice") == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ignored", "no single DistributedDataParallel has averaged all gradients"),
        ("hook", "no single DistributedDataParallel has averaged all gradients"),
        ("unfused", "a group of the optimizer has no `fused=True`"),
    ],
)
def test_where_ranks_may_differ_the_host_waits_and_says_why(
    ranks: Ranks, kind: str, why: str
) -> None:
    assert is_skipped_alike(ranks, kind)
    for rank in ranks:
        assert rank[kind]["texts"][0].startswith(f"waits once per step: {why}")
        assert told_of(rank, kind, "trap") == [[FAULT, None]]
        assert "; rank 1 contributed NaN or Inf\n" in rank[kind]["texts"][1]


@pytest.mark.parametrize("kind", ["one rank", "both ranks"])
def test_all_ranks_raise_at_the_next_step(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        found = rank[f"{kind}, raise"]
        assert found["error"]["step"] == FAULT
        assert found["moved"] == [True] * FAULT + [False]
        assert PARTED not in found["error"]["text"]
    assert ranks[0][f"{kind}, raise"]["weights"] == ranks[1][f"{kind}, raise"]["weights"]


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_each_rank_tells_which_rank_did_it_and_what_was_found_there(
    ranks: Ranks, then: str
) -> None:
    for rank in ranks:
        found = rank[f"one rank, {then}"]
        assert "; rank 1 contributed NaN or Inf\n" in found["texts"][0]
        assert found["found by"] == [1]
        assert "; ranks 0, 1 contributed NaN or Inf\n" in rank[f"both ranks, {then}"]["texts"][0]


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_what_one_rank_writes_after_the_reduction_stops_that_rank(ranks: Ranks, then: str) -> None:
    other, writer = (rank[f"written, {then}"] for rank in ranks)
    assert writer["error"]["step"] == FAULT
    assert writer["error"]["text"].splitlines()[1].endswith(PARTED)
    assert other["error"] is None
    assert other["moved"][FAULT]
    assert not writer["moved"][FAULT]


def test_a_gradient_that_no_pass_has_reached_is_waited_for(ranks: Ranks) -> None:
    other, writer = (rank["assigned"] for rank in ranks)
    assert other["error"] is None
    assert writer["error"]["step"] == FAULT
    for rank in (other, writer):
        text = "waits once per step: the last backward pass may not have averaged all gradients"
        assert rank["texts"][0] == text


def test_a_pause_of_one_rank_parts_the_ranks_and_the_other_names_the_step(ranks: Ranks) -> None:
    paused, other = (rank["paused"] for rank in ranks)
    assert paused["moved"][FAULT]
    assert other["error"]["text"].splitlines()[1].endswith(PARTED)


def test_what_all_ranks_repair_is_a_notice(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["repaired"]["moved"] == [True] * LAST
        assert told_of(rank, "repaired", "notice") == [[FAULT, None]]
        assert "repaired, no trap" in rank["repaired"]["texts"][0]


def test_a_rank_that_asks_early_waits_for_no_other_and_leaves_them_what_it_knows(
    ranks: Ranks,
) -> None:
    early, late = (rank["asked"]["texts"][0] for rank in ranks)
    assert "they were finite on this rank before ranks averaged them" in early
    assert "; rank 1 contributed NaN or Inf\n" in late


def test_in_healthy_steps_nothing_is_read_after_a_pass_and_no_vote_is_awaited(ranks: Ranks) -> None:
    # The host waits in the first update, where the optimizer makes its state; in the second pass ranks still vote.
    assert [rank["reads"] for rank in ranks] == [{"looks": 2, "votes": 1}] * 2


def test_the_plan_says_on_what_it_depends(ranks: Ranks) -> None:
    for rank in ranks:
        assert "decided on the device: the host reads" in rank["repaired"]["plan"]
        assert "if one DistributedDataParallel averages all" in rank["repaired"]["plan"]
