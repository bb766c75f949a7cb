"""On several ranks a running bound is that of one process, and what one rank sees alone is decided by all."""

from __future__ import annotations

import pytest
from distributed.spike_trap_worker import ABOVE, FACTORS, FAULT, PER, THEN, VARIANTS
from pairs import rows
from ranks import Ranks, Weights, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]

STEPS = len(FACTORS)
TOLERANCE = 1e-6
SETUPS = [
    *(f"{kind}, {variant}" for kind in ("DDP", "FSDP2") for variant in VARIANTS),
    "tensor parallel, plain",
]
# The set-up and the rule of each case: every pair of a set-up, a bound, and what it is over and does.
CASES = [
    (SETUPS[i], f"{list(ABOVE)[j]}, {PER[k]}, {THEN[m]}")
    for i, j, k, m in rows([SETUPS, list(ABOVE), list(PER), list(THEN)])
]
WORDS_OF_WORKER = [" | ".join(case) for case in CASES]


def unmoved(weights: list[Weights]) -> list[int]:
    return [step for step in range(1, len(weights)) if weights[step] == weights[step - 1]]


@pytest.mark.cell("DDP", "step")
@pytest.mark.cell("FSDP2 (`fully_shard`)", "step")
@pytest.mark.cell("tensor parallel", "step")
@pytest.mark.parametrize(("setup", "rule"), CASES)
def test_all_ranks_end_as_one_process_that_keeps_to_the_bound_by_hand(
    ranks: Ranks, setup: str, rule: str
) -> None:
    plain = "block" if setup.startswith("tensor parallel") else "one process"
    wanted, bare = (ranks[0]["same"][f"{plain} | {what}"] for what in (rule, "nothing"))
    for rank in ranks:
        found = rank["same"][f"{setup} | {rule}"]
        assert largest_difference(found["weights"], wanted["weights"]) < TOLERANCE
        spikes = [event for event in found["events"] if event[0] == "spike"]
        if "skip-step" in rule:
            assert len(spikes) == wanted["cut"]
    # The rule acts: without it the run ends elsewhere.
    assert wanted["cut"] >= 2
    assert largest_difference(wanted["weights"], bare["weights"]) > 1000 * TOLERANCE


@pytest.mark.parametrize(("setup", "rule"), CASES)
def test_all_ranks_learn_and_tell_the_same_bit_by_bit(ranks: Ranks, setup: str, rule: str) -> None:
    one, other = (rank["same"][f"{setup} | {rule}"] for rank in ranks)
    assert one == other
    skipped = sum(event[0] == "skipped-step" for event in one["events"])
    if "percentile" in rule:
        skipped = 0  # Norms of skipped updates enter, too.
    for updates in one["learnt"]:
        # Each update that took place once: no micro-batch, and none that was skipped.
        assert set(updates[0]) == {STEPS - skipped}


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_all_ranks_stop_at_the_same_step(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        stopped = rank["apart"][f"raise, {kind}"]
        assert stopped["error"]["step"] == FAULT
        assert len(stopped["weights"]) == FAULT
        # By the graph on DDP, and by the hooks on shards.
        text = stopped["error"]["text"]
        assert "the first gradient of the backward pass is large already, 2." in text
        given_up = rank["apart"][f"give up, {kind}"]
        assert "giving up: tripped 2 times in a row" in given_up["error"]["text"]
        assert given_up["error"]["step"] == FAULT
        assert unmoved(given_up["weights"]) == [FAULT - 1]
        assert given_up["weights"] == ranks[0]["apart"][f"give up, {kind}"]["weights"]


@pytest.mark.parametrize("then", ["skip-step", "raise"])
def test_ranks_do_not_decide_by_what_one_of_them_has_alone(ranks: Ranks, then: str) -> None:
    for rank in ranks:
        for per in ("parameter", "rule"):
            assert rank["apart"][f"refused, {per}, {then}"] == (
                "rule spikes: ranks decide by norms that all of them have, and DDP does not average the gradients of "
                "own.weight: a rank that stops or skips alone leaves the others waiting. `exclude` these, or use "
                "`then: warn` or `then: clip`"
            )
        assert len(rank["apart"][f"shared, {then}"]["weights"]) == STEPS
        assert rank["apart"][f"shared, {then}"]["events"] == []


@pytest.mark.parametrize("then", ["clip", "warn"])
def test_a_nan_of_one_rank_alone_is_told_there_and_enters_nothing(ranks: Ranks, then: str) -> None:
    other, own = (rank["apart"][f"alone, nan, {then}"] for rank in ranks)
    kind = "notice" if then == "clip" else "spike"
    assert own["events"][0][:2] == [kind, FAULT]
    assert other["events"][0][1] > FAULT
    # The last of the five gradients is each rank's own. The NaN is in the weight of rank 1 from then on, in
    # the average one step later, and in the weight of rank 0 after that.
    assert own["learnt"][0][0] == [FAULT + 1] * 4 + [FAULT]
    assert other["learnt"][0][0] == [FAULT + 1] * 4 + [FAULT + 2]


def test_a_large_gradient_of_one_rank_alone_is_cut_there(ranks: Ranks) -> None:
    other, own = (rank["apart"]["alone, large, clip"] for rank in ranks)
    assert own["events"] == [["spike", FAULT, "own.weight"]]
    assert other["events"] == []
    assert other["weights"] == own["weights"]
    # What all ranks have is learnt alike.
    for mine, theirs in zip(own["learnt"][0], other["learnt"][0], strict=True):
        assert mine[:4] == theirs[:4]


@pytest.mark.parametrize("what", ["over all", "over all, of clip-norm"])
def test_one_norm_over_what_ddp_averages_and_leaves_alone_is_warned_of(
    ranks: Ranks, what: str
) -> None:
    other, own = (rank["apart"][what] for rank in ranks)
    assert other["weights"] != own["weights"]
    for found in (other, own):
        told = [text for text in found["texts"] if "differ by rank" in text]
        assert len(told) == 1
        assert "averages and others (own.weight)" in told[0]
        assert found["events"][0] == ["notice", 0, ""]
    other, own = (rank["apart"]["over all but its own"] for rank in ranks)
    assert other["weights"] == own["weights"]
    assert "notice" not in [kind for kind, *_ in own["events"]]


@pytest.mark.parametrize("then", ["clip", "warn"])
def test_a_gradient_that_one_rank_lacks_is_learnt_where_it_is(ranks: Ranks, then: str) -> None:
    other, own = (rank["apart"][f"alone, none, {then}"] for rank in ranks)
    assert other["weights"] == own["weights"]
    assert len(own["weights"]) == STEPS
    assert own["learnt"][0][0] == [STEPS] * 4 + [STEPS // 2]
    assert other["learnt"][0][0] == [STEPS] * 5
