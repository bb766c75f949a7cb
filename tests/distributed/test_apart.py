"""Ranks that differ end alike: none hangs, all decide the same, and whoever lacks the rules is named."""

from __future__ import annotations

import pytest
from distributed.apart_worker import FAULT, STEPS
from ranks import Json, Ranks

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

ALL = list(range(STEPS))
SKIPPED = [step for step in ALL if step != FAULT]

UNRECORDED = (
    "not all ranks that share its parameters measured the same backward passes (one was paused, removed its session or left "
    "an update out): those steps have no record of them"
)


def moved(run: Json) -> list[int]:
    """Return the steps that moved the weights."""
    weights = run["weights"]
    return [step for step in ALL if step == 0 or weights[step] != weights[step - 1]]


def kinds(run: Json) -> list[tuple[str, int, str]]:
    """Return what the events are about."""
    return [(kind, step, name) for kind, step, name, _ in run["events"]]


def test_a_trap_on_one_rank_alone_warns_of_it_and_goes_on(ranks: Ranks) -> None:
    one, other = (rank["one rank, raise"] for rank in ranks)
    assert one["said"] == [
        "nothing heard of rules on rank 1 within 0.5 s: this rank decides alone, and records nothing of parameters that "
        "ranks share; apply the same rules on all ranks, with the same `mode` and `start_step`"
    ]
    assert one["weights"] == other["weights"]
    assert moved(one) == ALL
    assert one["clock"] == STEPS


@pytest.mark.parametrize("rule", ["skip-step", "bound"])
def test_what_lets_weights_drift_apart_is_refused_on_one_rank(ranks: Ranks, rule: str) -> None:
    one = ranks[0][f"one rank, {rule}"]
    assert one["error"] == (
        "nothing heard of rules on rank 1 within 0.5 s: norms over shards, and "
        "gradients of single losses, would wait for ever, and weights would drift apart if a step is skipped or a final gradient edited; "
        "apply the same rules on all ranks, with the same `mode` and `start_step`"
    )
    assert one["clock"] == 0
    assert moved(ranks[1][f"one rank, {rule}"]) == ALL


@pytest.mark.parametrize("rule", ["warn", "early", "norms"])
def test_what_only_records_or_is_averaged_waits_for_nobody(ranks: Ranks, rule: str) -> None:
    one, other = (rank[f"one rank, {rule}"] for rank in ranks)
    assert (one["said"], one["error"]) == ([], None)
    # That AdamW cancels a scale concerns no other rank.
    other_events = [event for event in one["events"] if "running size" not in event[-1]]
    assert other_events == []
    assert one["weights"] == other["weights"]


def test_a_rank_with_other_rules_is_named(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        other = 1 - number
        (text,) = rank["plans, raise"]["said"]
        assert text.startswith(
            f"rank {other} has other rules, mode or step than rank {number}: this rank decides alone"
        )
        assert rank["plans, raise"]["error"] is None
        assert rank["plans, skip"]["error"].startswith(
            f"rank {other} has other rules, mode or step than rank {number}: norms over shards"
        )
        assert rank["plans, records"]["said"] == []
        assert rank["plans, records"]["error"] is None


@pytest.mark.parametrize(
    ("run", "name", "faulty"),
    [
        ("ignored, skip-step", "part.own", 1),
        ("ignored, first", "part.own", 0),
        ("hooked", "side.bias", 1),
    ],
)
def test_what_one_rank_alone_has_is_skipped_on_all(
    ranks: Ranks, run: str, name: str, faulty: int
) -> None:
    for number, rank in enumerate(ranks):
        assert moved(rank[run]) == SKIPPED
        own = [("trap", FAULT, name)] if number == faulty else []
        assert kinds(rank[run]) == [*own, ("skipped-step", FAULT, name)]
    text = ranks[1 - faulty][run]["events"][0][3]
    assert text.startswith(
        f"step 2: rank {faulty} trapped, and all ranks skip the step: step 2, rule trap: "
    )
    if run != "hooked":  # where nothing is averaged, weights differ
        assert ranks[0][run]["weights"] == ranks[1][run]["weights"]


def test_what_one_rank_alone_has_stops_all(ranks: Ranks) -> None:
    own, other = (ranks[number]["ignored, raise"] for number in (1, 0))
    head = "step 2, rule trap: 1 of 7 gradients are not finite after backward"
    assert own["error"].startswith(f"{head}\nstopped before the update: no weight was moved\n")
    assert other["error"].startswith(f"step 2: rank 1 trapped, and all ranks stop: {head}\n")
    # The same report, but for what becomes of the step; what was not reproduced is told by the rank that has tried.
    report = own["error"].partition("\ndiagnosis: not reproduced")[0].splitlines()[2:]
    assert len(report) > 5
    assert [line for line in other["error"].splitlines() if line in report] == report
    assert kinds(own) == kinds(other) == [("trap", FAULT, "part.own")]


@pytest.mark.parametrize("then", ["skip-step", "raise"])
def test_what_comes_after_the_vote_stops_the_rank_that_has_it(ranks: Ranks, then: str) -> None:
    other, own = (rank[f"edited, {then}"] for rank in ranks)
    head, outcome = own["error"].splitlines()[:2]
    assert head == (
        "step 2, rule trap: 1 of 7 gradients are not finite right before the update, and finite after backward: "
        "something in between did it"
    )
    assert outcome.startswith(
        "stopped on this rank before the update: the ranks did not vote on this"
        if then == "skip-step"
        else "stopped before the update: no weight was moved"
    )
    assert kinds(own) == [("trap", FAULT, "last.bias")]
    # The other has made its update, and learns at the next one that nobody votes with it any more.
    assert moved(other) == ALL
    assert kinds(other) == [("notice", FAULT + 1, "")]
    assert other["error"] is None
    assert other["said"] == [
        "rank 1 has no session any more: this update takes place, and later traps raise on their own rank"
    ]


@pytest.mark.parametrize("run", ["ignored, warn", "ignored, observed", "edited, warn"])
def test_rules_that_only_tell_wait_for_nobody(ranks: Ranks, run: str) -> None:
    name = "last.bias" if run == "edited, warn" else "part.own"
    assert ("trap", FAULT, name) in kinds(ranks[1][run])
    assert FAULT not in [step for _, step, _ in kinds(ranks[0][run])]


def test_a_paused_rank_does_what_the_others_decide(ranks: Ranks) -> None:
    paused = ("notice", 1, "")
    assert [kinds(rank["paused, None"]) for rank in ranks] == [[], [paused]]
    assert [len(rank["paused, None"]["norms"]) for rank in ranks] == [STEPS, 2]
    for number, rank in enumerate(ranks):
        run = rank["paused, 0"]
        assert moved(run) == SKIPPED
        assert run["clock"] == STEPS
        own = ("trap", FAULT, "part.own") if number == 0 else paused
        assert kinds(run) == [own, ("skipped-step", FAULT, "part.own")]
        assert run["weights"] == ranks[0]["paused, 0"]["weights"]


@pytest.mark.parametrize("run", ["paused sharded, None", "paused records"])
def test_a_pass_that_one_rank_is_paused_in_has_no_record_of_shards(ranks: Ranks, run: str) -> None:
    for number, rank in enumerate(ranks):
        assert rank[run]["clock"] == STEPS
        assert [step for step, _ in rank[run]["norms"]] == [0, 4]
        notices = 2 if (run, number) == ("paused records", 0) else 1
        assert [kind for kind, _, _ in kinds(rank[run])] == ["notice"] * notices
    assert ranks[0][run]["events"][0][3] == UNRECORDED


def test_a_paused_rank_skips_with_the_others_that_hold_the_shards(
    ranks: Ranks,
) -> None:
    for number, rank in enumerate(ranks):
        run = rank["paused sharded, 0"]
        assert moved(run) == SKIPPED
        found = [FAULT, FAULT, STEPS] if number == 0 else [1, FAULT]
        assert [step for _, step, _ in kinds(run)] == found


def test_without_a_group_in_common_each_rank_decides_alone_and_says_so(
    ranks: Ranks,
) -> None:
    one, other = (rank["alone"] for rank in ranks)
    assert kinds(one) == [("notice", 0, "")]
    assert kinds(other) == [
        ("notice", 0, ""),
        ("trap", FAULT, "last.bias"),
        ("skipped-step", FAULT, "last.bias"),
    ]
    assert one["events"][0][3] == (
        "the ranks did not take the last backward pass before this update together (no DistributedDataParallel, no shards, "
        "or `no_sync`): each rank decides alone whether to stop or to skip it"
    )
    assert (moved(one), moved(other)) == (ALL, SKIPPED)


def test_a_session_that_comes_late_is_told(ranks: Ranks) -> None:
    early, late = (rank["later"] for rank in ranks)
    assert early["said"][0].startswith("nothing heard of rules on rank 1 within 0.5 s")
    assert late["said"][0].startswith(
        "nothing heard of rules on rank 0 within 0.5 s: this rank decides alone"
    )
    assert early["weights"] == late["weights"]


def test_norms_over_shards_are_refused_where_one_rank_alone_asks_for_them(
    ranks: Ranks,
) -> None:
    one, other = (rank["bounded on one"] for rank in ranks)
    assert one["error"].startswith(
        "nothing heard of rules on rank 1 within 0.5 s: norms over shards"
    )
    assert moved(one) == moved(other) == ALL


def test_records_of_shards_on_one_rank_alone_wait_for_nobody(ranks: Ranks) -> None:
    one, other = (rank["sharded on one"] for rank in ranks)
    assert one["error"] is None
    # Told at the end: the other rank may come at any time.
    assert one["said"] == [
        "nothing heard of rules on rank 1: this rank records nothing of parameters that ranks share; "
        "apply the same rules on all ranks, with the same `mode` and `start_step`"
    ]
    assert one["weights"] == other["weights"]
    assert moved(one) == moved(other) == ALL


def test_an_overflow_that_one_scaler_sees_is_skipped_on_all(ranks: Ranks) -> None:
    for rank in ranks:
        assert moved(rank["scaled"]) == SKIPPED
    assert kinds(ranks[1]["scaled"]) == [("scaler-skip", FAULT, "")]
    assert kinds(ranks[0]["scaled"]) == [("skipped-step", FAULT, "")]
    assert ranks[0]["scaled"]["events"][0][3].startswith(
        "step 2: all ranks skip the step, because the scaled gradients of rank 1 overflowed and those of other ranks did not: "
    )


def test_sessions_that_are_over_leave_only_closed_rolls_for_ranks_that_may_come(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        assert [
            key
            for key in rank["keys"]
            if "/matched/" not in key and not key.endswith("/met/closed")
        ] == []
        # Of the sessions on one rank alone, and of the one that comes later.
        assert 0 < len([key for key in rank["keys"] if key.endswith("/met/closed")]) <= 12
