"""Each rank judges its own loss, and all ranks do what one of them decides."""

from __future__ import annotations

import pytest
from distributed.loss_spikes_worker import FAULT, STEPS
from ranks import Ranks


def _rests(weights: list[list[object]]) -> list[int]:
    return [step for step in range(1, len(weights)) if weights[step] == weights[step - 1]]


@pytest.mark.parametrize("setup", ["DDP", "accumulated", "FSDP2"])
def test_the_spike_of_one_rank_is_skipped_by_all(ranks: Ranks, setup: str) -> None:
    other, own = (rank[setup] for rank in ranks)
    assert other["weights"] == own["weights"]
    assert _rests(own["weights"]) == [FAULT]
    (spike, skipped) = own["events"]
    assert spike[:3] == ["spike", FAULT, "loss"]
    assert "spike: loss 100 is above" in spike[3]
    assert skipped[:3] == ["skipped-step", FAULT, "loss"]
    ((kind, step, name, text),) = other["events"]
    assert (kind, step, name) == ("skipped-step", FAULT, "loss")
    assert f"step {FAULT}: rank 1 trapped, and all ranks skip the step" in text
    # No rank learns from the update that did not take place.
    assert [rank[setup]["learnt"][0] for rank in ranks] == [STEPS - 1] * 2
    # Of different losses.
    assert other["learnt"][1] != own["learnt"][1]


@pytest.mark.parametrize("setup", ["warn", "observe"])
def test_a_rank_that_only_tells_does_so_alone(ranks: Ranks, setup: str) -> None:
    other, own = (rank[setup] for rank in ranks)
    assert other["events"] == []
    assert [event[:3] for event in own["events"]] == [["spike", FAULT, "loss"]]
    assert other["weights"] == own["weights"]
    assert _rests(own["weights"]) == []


def test_all_ranks_stop_where_one_raises(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["raise"]["raised"] == {"rank": 1, "name": "loss", "step": FAULT}
        assert len(rank["raise"]["weights"]) == FAULT


def test_a_rank_waits_for_none_that_has_no_session(ranks: Ranks) -> None:
    with_session, without = (rank["alone"] for rank in ranks)
    assert ["spike", FAULT] in with_session["events"]
    assert with_session["weights"] == without["weights"]
