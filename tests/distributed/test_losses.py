"""Two real ranks combine their losses as one process does with both batches, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from distributed.losses_worker import (
    FEATURES,
    RUNS,
    SHARDED,
    UNLIKE_PASSES,
)
from ranks import Ranks, largest_difference
from small import hold_rows

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]


@pytest.mark.parametrize(("method", "setup"), RUNS)
def test_ranks_end_as_one_process_on_the_joined_batch(
    ranks: Ranks, method: str, setup: str
) -> None:
    kind = "no_sync" if setup == "no_sync" else ""
    wanted = ranks[0][", ".join(filter(None, (method, "one process", kind)))]
    for rank in ranks:
        found = rank[f"{method}, {setup}"]
        assert largest_difference(found["weights"], wanted["weights"]) < 1e-12
        # In `no_sync` each rank records what it has seen alone.
        for name in () if kind else ("cosines", "weight"):
            hold_rows(found[name], wanted[name], rel=1e-5)
    # The losses conflict.
    assert max(value for _, value in ranks[0]["mgda, one process"]["cosines"]) < 0


def test_a_nan_of_one_rank_is_seen_by_all(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["nan"]["unmoved"]
        (said,) = rank["nan"]["said"]
        assert said.startswith("the gradient of seg is non-finite")


@pytest.mark.parametrize("kind", [*SHARDED, "late"])
def test_sharded_parameters_are_refused_with_the_form_on_modules(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        said = rank["late"] if kind == "late" else rank["refused"][kind]
        assert "combine" in said
        assert "input.grad" in said, said


@pytest.mark.parametrize("setup", FEATURES)
def test_on_features_all_get_the_mean_of_what_each_rank_has_combined(
    ranks: Ranks, setup: str
) -> None:
    alone = [rank["on features"]["alone"] for rank in ranks]
    assert [one["changed"] for one in alone] == [1.0, 1.0]
    both = torch.tensor([one["grads"][0] for one in alone])
    assert (both[0] - both[1]).abs().max() > 1e-3
    wanted = [
        torch.tensor([a, b]).mean(0).tolist()
        for a, b in zip(*(o["grads"] for o in alone), strict=True)
    ]
    for rank in ranks:
        assert largest_difference(rank["on features"][setup]["grads"], wanted) < 1e-6


def test_a_rule_on_heads_says_that_they_were_sharded_later(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["heads sharded later"]
        assert found["fired"] == 0
        assert "no two of the modules the rule matched sent gradients back" in found["said"][0]
        assert rank["trunk sharded later"]["fired"] == 3


@pytest.mark.parametrize("what", UNLIKE_PASSES)
def test_ranks_that_pass_other_losses_are_refused_alike(ranks: Ranks, what: str) -> None:
    # What is not averaged is each rank's own.
    alike = what in ("on another model", "no_sync")
    for number, rank in enumerate(ranks):
        seen = rank["unlike passes"][what]
        assert ["must pass the same losses" in said for said in seen["refused"]] == [True] * (
            not alike
        )
        assert seen["fired"] == (3 - (what == "no_sync" and number == 1) if alike else 1)


def test_a_reentrant_checkpoint_is_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert "got a gradient that no single loss gives it" in rank["reentrant"]
        assert "trunk.0.block" in rank["reentrant"]


def test_a_solver_that_fails_on_one_rank_keeps_no_other_waiting(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        assert rank["failing on one"]["same"] == [True, False, False]
    assert ranks[0]["failing on one"]["grads"] == ranks[1]["failing on one"]["grads"]
