"""On several ranks all stop and skip alike by a running bound, and what one rank sees alone is decided by all."""

from __future__ import annotations

import pytest
from distributed.spike_trap_worker import FACTORS, FAULT
from ranks import Ranks, Weights

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]

STEPS = len(FACTORS)


def unmoved(weights: list[Weights]) -> list[int]:
    return [step for step in range(1, len(weights)) if weights[step] == weights[step - 1]]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_all_ranks_stop_at_the_same_step(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        stopped = rank[f"raise, {kind}"]
        assert stopped["error"]["step"] == FAULT
        assert len(stopped["weights"]) == FAULT
        # By the graph on DDP, and by the hooks on shards.
        text = stopped["error"]["text"]
        assert "the first gradient of the backward pass is large already, 2." in text
        given_up = rank[f"give up, {kind}"]
        assert "giving up: tripped 2 times in a row" in given_up["error"]["text"]
        assert given_up["error"]["step"] == FAULT
        assert unmoved(given_up["weights"]) == [FAULT - 1]
        # What the ranks have learnt is the same to the bit: each update that took place, and none that was skipped.
        assert given_up == ranks[0][f"give up, {kind}"]
        assert set(given_up["learnt"][0][0]) == {FAULT - 1}


@pytest.mark.parametrize("then", ["clip", "warn"])
def test_a_nan_of_one_rank_alone_is_told_there_and_enters_nothing(ranks: Ranks, then: str) -> None:
    other, own = (rank[f"alone, nan, {then}"] for rank in ranks)
    kind = "notice" if then == "clip" else "spike"
    assert own["events"][0][:2] == [kind, FAULT]
    assert other["events"][0][1] > FAULT
    # The last of the five gradients is each rank's own. The NaN is in the weight of rank 1 from then on, in
    # the average one step later, and in the weight of rank 0 after that.
    assert own["learnt"][0][0] == [FAULT + 1] * 4 + [FAULT]
    assert other["learnt"][0][0] == [FAULT + 1] * 4 + [FAULT + 2]


def test_a_large_gradient_of_one_rank_alone_is_cut_there(ranks: Ranks) -> None:
    other, own = (rank["alone, large, clip"] for rank in ranks)
    assert own["events"] == [["spike", FAULT, "own.weight"]]
    assert other["events"] == []
    assert other["weights"] == own["weights"]
    # What all ranks have is learnt alike.
    for mine, theirs in zip(own["learnt"][0], other["learnt"][0], strict=True):
        assert mine[:4] == theirs[:4]


@pytest.mark.parametrize("then", ["clip", "warn"])
def test_a_gradient_that_one_rank_lacks_is_learnt_where_it_is(ranks: Ranks, then: str) -> None:
    other, own = (rank[f"alone, none, {then}"] for rank in ranks)
    assert other["weights"] == own["weights"]
    assert len(own["weights"]) == STEPS
    assert own["learnt"][0][0] == [STEPS] * 4 + [STEPS // 2]
    assert other["learnt"][0][0] == [STEPS] * 5
