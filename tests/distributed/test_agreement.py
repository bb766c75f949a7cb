"""All ranks decide alike, and those that have seen nothing say which rank has."""

from __future__ import annotations

import pytest
from distributed.agreement_worker import FAULT, STEPS
from ranks import Ranks

pytestmark = pytest.mark.cover_children


@pytest.mark.parametrize("what", ["params", "module"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_step_is_skipped_on_all_ranks(ranks: Ranks, kind: str, what: str) -> None:
    for rank in ranks:
        weights = rank[f"{kind} {what} skip-step"]["weights"]
        assert len(weights) == STEPS
        assert weights[FAULT] == weights[FAULT - 1]
        assert weights[FAULT + 1] != weights[FAULT]
        assert weights == ranks[0][f"{kind} {what} skip-step"]["weights"]


@pytest.mark.parametrize("what", ["params", "module"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_all_ranks_raise_at_the_same_step(ranks: Ranks, kind: str, what: str) -> None:
    for rank in ranks:
        seen = rank[f"{kind} {what} raise"]
        assert seen["error"]["step"] == FAULT
        assert seen["error"]["rule"] == "trap"
        assert len(seen["weights"]) == FAULT


def test_an_average_is_traced_to_the_rank_that_made_it_nonfinite(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        error = rank["DDP params raise"]["error"]
        assert (error["rank"], error["name"]) == (1, "2.bias")
        assert "; rank 1 contributed NaN or Inf\n" in error["text"]
        assert "NaN  2.bias    1 element\n" in error["text"]


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_micro_batch_that_is_not_reduced_is_traced_as_well(ranks: Ranks, faulty: int) -> None:
    for number, rank in enumerate(ranks):
        weights = rank[f"piece {faulty} skip-step"]["weights"]
        assert len(weights) == STEPS
        assert weights[FAULT] == weights[FAULT - 1]
        assert weights[FAULT + 1] != weights[FAULT]
        assert weights == ranks[0][f"piece {faulty} skip-step"]["weights"]
        error = rank[f"piece {faulty} raise"]["error"]
        assert (error["rank"], error["name"]) == (1, "2.bias")
        # Only the faulty rank had it before the reduction.
        seen = 1 if (faulty, number) == (0, 1) else 2
        assert f"after backward, micro-batch {seen} of 2; rank 1 contributed" in error["text"]


@pytest.mark.parametrize("params", ["side.*", "*"])
def test_what_one_rank_alone_has_used_is_traced_to_it(ranks: Ranks, params: str) -> None:
    for rank in ranks:
        seen = rank[f"used by one, {params}"]
        assert len(seen["weights"]) == FAULT
        assert seen["error"]["rank"] == 0
        assert "; rank 0 contributed NaN or Inf\n" in seen["error"]["text"]
        # What DDP fills in comes past the hooks, as it should.
        assert "hook-rearmed" not in [kind for kind, _, _ in seen["events"]]
    assert ranks[0][f"used by one, {params}"]["error"]["name"] == "side.bias"


def test_each_rank_reports_its_parts(ranks: Ranks) -> None:
    # Row 0 of layer 2 lies on rank 0, whichever rank made it non-finite; layer 0 is non-finite on both.
    first, second = (rank["FSDP2 params raise"]["error"] for rank in ranks)
    assert (first["rank"], first["name"]) == (0, "2.weight")
    assert (second["rank"], second["name"]) == (1, "0.weight")
    assert "NaN  2.weight  4 elements\n" in first["text"]
    assert "NaN     0.weight  8 elements\n" in second["text"]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_rank_that_saw_nothing_names_the_one_that_did(ranks: Ranks, kind: str) -> None:
    own, other = ranks[1][f"{kind} module raise"], ranks[0][f"{kind} module raise"]
    assert (own["error"]["rank"], own["error"]["name"]) == (1, "probe")
    assert (other["error"]["rank"], other["error"]["name"]) == (1, "probe")
    assert own["error"]["text"].startswith("step 2, rule trap: 1 of 1 tensors are not finite")
    assert other["error"]["text"].startswith("step 2: rank 1 trapped, and all ranks stop: ")
    # What becomes of the step stands before the report of each rank by itself.
    told = [line for line in own["error"]["text"].splitlines() if not line.startswith("stopped")]
    assert len(told) < len(own["error"]["text"].splitlines())
    assert set(told) <= set(other["error"]["text"].partition("all ranks stop: ")[2].splitlines())
    assert "found by rank 1, in its part of the batch:" in other["error"]["text"].splitlines()
    skipped = ranks[0][f"{kind} module skip-step"]
    assert skipped["events"] == [["skipped-step", FAULT, "probe"]]
    assert skipped["texts"][0].startswith("step 2: rank 1 trapped, and all ranks skip the step: ")


def test_giving_up_is_agreed(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["FSDP2 give up"]["error"]["step"] == FAULT
        assert "tripped 1 times in a row" in rank["FSDP2 give up"]["error"]["text"]


def test_a_rank_whose_rule_rests_skips_with_those_whose_rule_trips(
    ranks: Ranks,
) -> None:
    first, second = (rank["scheduled"] for rank in ranks)
    assert first["moved"] == [step != FAULT for step in range(STEPS)]
    assert second["moved"] == [False, *first["moved"][1:]]
    assert first["events"] == ["trap", "skipped-step"]
    assert second["events"] == ["skipped-step"]


@pytest.mark.cell(
    "DDP",
    "step",
    refused="a `spike-trap` that skips or raises, on parameters that DDP does not average: `exclude` them",
)
def test_spikes_of_what_a_rank_has_alone_are_refused(ranks: Ranks) -> None:
    refused = (
        "rule spikes: ranks decide by norms that all of them have, and DDP does not average the gradients of "
        "2.bias: a rank that stops or skips alone leaves the others waiting. `exclude` these, or use `then: warn` "
        "or `then: clip`"
    )
    assert [rank["own spikes"] for rank in ranks] == [[refused, refused]] * 2


@pytest.mark.cell(
    "DDP under `Join`",
    "backward",
    "accumulated",
    "step",
    "modules",
    refused="ranks with different numbers of steps cannot agree: give every rank the same number of batches",
)
def test_uneven_inputs_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["uneven"].startswith("the model trains under `Join`")
        assert "`drop_last`" in rank["uneven"]
