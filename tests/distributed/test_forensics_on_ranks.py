"""A fault of one rank is diagnosed, and told everywhere; a model that ranks divide is not run again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from distributed.forensics_worker import FAULT, STEPS
from ranks import Json, Ranks, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]
BORN = "diagnosis (reproduced): NaN born in the forward pass of body (Body): aten.log"
NOBODY = "diagnosis: not reproduced, so no operation is blamed"
BY_OTHER = "found by rank 1, in its part of the batch:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forensics")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Json]:
    return run_ranks(Path(__file__).with_name("forensics_worker.py"), folder / "seen")


def _stopped_at(seen: Json, then: str) -> bool:
    return bool(seen["step"] == (FAULT if then == "raise" else STEPS - 1))


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_the_rank_that_did_it_names_the_operation(ranks: Ranks, then: str) -> None:
    other, guilty = (rank[f"DDP {then}"] for rank in ranks)
    assert BORN in guilty["told"][0]
    # Its own calls were finite, the average was not; who reads its log reads what was found elsewhere.
    assert f"{BY_OTHER}\n{BORN}" in other["told"][0]
    assert BY_OTHER not in guilty["told"][0]
    assert _stopped_at(guilty, then)
    assert _stopped_at(other, then)
    if then == "raise":
        assert BORN in guilty["error"]


def test_rows_and_samples_are_those_of_the_rank_that_did_it(ranks: Ranks) -> None:
    other, guilty = (rank["DDP skip-step"]["told"][0] for rank in ranks)
    rows = (
        "  all in rows 1, 2 and 3 of 4, columns 0, 2 and 3, from rows 1, 2 and 3 of the input "
        "(sample_ids 5, 6 and 7)"
    )
    assert rows in guilty
    assert rows in other
    assert "\nsamples of this step: sample_ids 4, 5, 6 and 7\n" in guilty
    assert "\nsamples of this step: sample_ids 0, 1, 2 and 3\n" in other


def test_nan_in_the_batch_of_a_rank_is_told_there_at_the_first_skip_of_a_scaler(
    ranks: Ranks,
) -> None:
    other, guilty = (rank["scaled"]["notices"] for rank in ranks)
    assert other == []
    (notice,) = guilty
    assert f"step {FAULT}, rule trap: the GradScaler skips a step that no loss scale can" in notice
    assert "the input x of the root (Net) was not finite when the model was called (NaN)" in notice
    assert "the step was not run again" in notice


@pytest.mark.parametrize("kind", ["raise", "skip-step", "warn", "paused", "whole"])
def test_a_model_that_fully_shard_divides_is_not_run_again(ranks: Ranks, kind: str) -> None:
    paused, guilty = (rank[f"FSDP2 {kind}"] for rank in ranks)
    for seen in (guilty,) if kind == "paused" else (paused, guilty):
        first = seen["told"][0]
        assert "4 of 4 gradients are not finite" in first or kind == "whole"
        assert f"{NOBODY}\n  not reproduced because the parameters are divided over ranks" in first
        assert seen["notices"] == []


def test_a_rank_of_a_divided_model_names_an_input_that_was_nan(
    ranks: Ranks,
) -> None:
    other, guilty = (rank["FSDP2 given NaN"] for rank in ranks)
    born = "the input x of the root (FSDPNet) was not finite when the model was called (NaN)"
    assert born in guilty["told"][0]
    assert "partial because the parameters are divided over ranks" in guilty["told"][0]
    assert BY_OTHER in other["told"][0]
    assert born in other["told"][0]


def test_a_divided_model_writes_no_bundle(ranks: Ranks, folder: Path) -> None:
    for rank, seen in enumerate(ranks):
        assert NOBODY in seen["FSDP2 recorded"]["told"][0]
        assert "bundle" not in seen["FSDP2 recorded"]["told"][0]
        assert list((folder / str(rank)).glob("*trap-step*")) == []


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_a_forward_pass_that_talks_to_other_ranks_is_not_run_again(ranks: Ranks, then: str) -> None:
    for rank in ranks:
        seen = rank[f"gathered {then}"]
        assert _stopped_at(seen, then)
        assert NOBODY in seen["told"][0]
    reason = "talks to other ranks, which do not take part in the replay"
    assert reason in ranks[1][f"gathered {then}"]["told"][0]


def test_a_diagnosis_leaves_the_run_as_it_was(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["FSDP2 skip-step"]["state"] == rank["FSDP2 bare"]["state"]
        assert math.isfinite(rank["FSDP2 bare"]["state"]["last.bias"][0])


def test_an_evaluation_before_the_step_does_not_blind_the_trap(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        seen = rank["FSDP2 evaluated"]
        assert seen["step"] == FAULT
        assert "4 of 4 gradients are not finite" in seen["error"]
        assert all(math.isfinite(value) for value in seen["state"]["last.bias"])


def test_ranks_agree_where_parameters_stay_whole_between_passes(
    ranks: Ranks,
) -> None:
    states = [rank["FSDP2 whole"]["state"] for rank in ranks]
    assert states[0] == states[1]
