"""A fault of one rank is diagnosed, and told everywhere; a rank waits for others where all replay together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from distributed.forensics_worker import FAULT, STEPS, halves
from ranks import run_ranks

import gradsurgeon

pytestmark = pytest.mark.cover_children
BORN = "diagnosis (reproduced): NaN born in the forward pass of body (Body): aten.log"
NOBODY = "diagnosis: not reproduced, so no operation is blamed"
BY_OTHER = "found by rank 1, in its part of the batch:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forensics")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__).with_name("forensics_worker.py"), folder / "seen")


def _stopped_at(seen: dict[str, Any], then: str) -> bool:
    return bool(seen["step"] == (FAULT if then == "raise" else STEPS - 1))


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_the_rank_that_did_it_names_the_operation(ranks: list[dict[str, Any]], then: str) -> None:
    innocent, guilty = (rank[f"DDP {then}"] for rank in ranks)
    assert BORN in guilty["told"][0]
    # Its own calls were finite, the average was not; who reads its log reads what was found elsewhere.
    assert f"{BY_OTHER}\n{BORN}" in innocent["told"][0]
    assert BY_OTHER not in guilty["told"][0]
    assert _stopped_at(guilty, then)
    assert _stopped_at(innocent, then)
    if then == "raise":
        assert BORN in guilty["error"]


def test_nan_in_the_batch_of_a_rank_is_told_there_at_the_first_skip_of_a_scaler(
    ranks: list[dict[str, Any]],
) -> None:
    innocent, guilty = (rank["scaled"]["notices"] for rank in ranks)
    assert innocent == []
    (notice,) = guilty
    assert f"step {FAULT}, rule trap: the GradScaler skips a step that no loss scale can" in notice
    assert "the input x of the root (Net) was not finite when the model was called (NaN)" in notice
    assert "the step was not run again" in notice


@pytest.mark.parametrize("then", ["raise", "skip-step"])
@pytest.mark.parametrize(("kind", "dtype"), [("FSDP2", "float32"), ("FSDP2 halves", "bfloat16")])
def test_a_model_that_fully_shard_divides_is_run_again_by_all_ranks(
    ranks: list[dict[str, Any]], kind: str, dtype: str, then: str
) -> None:
    innocent, guilty = (rank[f"{kind} {then}"] for rank in ranks)
    for seen in (innocent, guilty):
        assert _stopped_at(seen, then)
        # The first trip alone: what comes after it is finite.
        assert [message.count(BORN) for message in seen["told"]] == [1]
        # The dtype of the mixed precision, and the part of the batch of one rank.
        assert f"  in   self [4, 4] {dtype}: " in seen["told"][0]
        assert "  cause: mathematics\n" in seen["told"][0]
        assert seen["notices"] == []
    assert f"{BY_OTHER}\n{BORN}" in innocent["told"][0]
    assert BY_OTHER not in guilty["told"][0]


def test_what_lands_in_the_part_of_another_rank_is_found_where_it_was_born(
    ranks: list[dict[str, Any]],
) -> None:
    innocent, guilty = (rank["FSDP2 row raise"] for rank in ranks)
    # One row of a weight is not finite, which the first rank keeps, and the second has made.
    assert "first.weight  4 elements\n" in innocent["told"][0]
    born = "diagnosis (reproduced): Inf born in the backward pass of body (Row): aten.div (SqrtBackward0)"
    assert f"{BY_OTHER}\n{born}" in innocent["error"]
    assert f"\n{born}" in guilty["error"]


def test_the_micro_batch_is_named_that_ranks_did_not_reduce(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        # All that came out of that call is NaN: nothing finite proves that it is the same one.
        born = BORN.replace("reproduced", "partial")
        assert f"{born}, micro-batch 2 of 3" in rank["FSDP2 accumulated"]["told"][0]


def test_a_paused_rank_takes_part_though_it_has_kept_nothing(ranks: list[dict[str, Any]]) -> None:
    paused, guilty = (rank["FSDP2 paused"] for rank in ranks)
    assert BORN in guilty["told"][0]
    assert BORN in paused["error"]


def test_ranks_that_do_not_meet_run_nothing_again(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        told = rank["FSDP2 warn"]["told"][0]
        assert f"{NOBODY}\n  because the parameters are divided over ranks" in told
        assert "only with `fully_shard` and a rule with `then: raise` or `skip-step`" in told


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_a_forward_pass_that_talks_to_other_ranks_is_not_run_again(
    ranks: list[dict[str, Any]], then: str
) -> None:
    for rank in ranks:
        seen = rank[f"gathered {then}"]
        assert _stopped_at(seen, then)
        assert NOBODY in seen["told"][0]
    reason = "talks to other ranks, which do not take part in the replay"
    assert reason in ranks[1][f"gathered {then}"]["told"][0]


def test_a_replay_of_all_ranks_leaves_the_run_as_it_was(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        with_replay, bare = rank["FSDP2 halves skip-step"], rank["FSDP2 halves bare"]
        assert BORN in with_replay["told"][0]
        assert BORN not in bare["told"][0]
        # Weights after the steps that follow, with their dropout; and a buffer that counts calls.
        assert with_replay["state"] == bare["state"]
        assert with_replay["state"]["norm.calls"] == STEPS
        assert math.isfinite(with_replay["state"]["last.bias"][0])


def test_a_further_way_into_a_module_leaves_it_divided(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        seen, bare = rank["FSDP2 method skip-step"], rank["FSDP2 method bare"]
        # The method calls `forward` past the hooks of its module.
        born = "(reproduced): NaN born in the forward pass of the root (FSDPByMethod): aten.log"
        assert born in seen["told"][0]
        assert seen["divided"]
        assert seen["state"] == bare["state"]


@pytest.mark.parametrize("kind", ["FSDP2 wrapped", "FSDP2 hooked"])
def test_wrappers_and_hooks_stand_where_they_stood(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        assert BORN in rank[kind]["told"][0]


def test_an_evaluation_before_the_step_does_not_blind_the_trap(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        seen = rank["FSDP2 evaluated"]
        assert seen["step"] == FAULT
        assert "4 of 4 gradients are not finite" in seen["error"]
        assert all(math.isfinite(value) for value in seen["state"]["last.bias"])


def test_ranks_agree_where_parameters_stay_whole_between_passes(
    ranks: list[dict[str, Any]],
) -> None:
    states = [rank["FSDP2 whole"]["state"] for rank in ranks]
    assert states[0] == states[1]
    for rank in ranks:
        assert rank["FSDP2 whole"]["notices"] == []
        assert BORN in rank["FSDP2 whole"]["told"][0]


def test_a_bundle_of_a_divided_model_is_run_again_in_one_process(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    told = ranks[1]["FSDP2 halves bundle"]["told"][0]
    (bundle,) = (folder / "1").glob("*trap-step*")
    # A rank that has found nothing has nothing to run again.
    assert list((folder / "0").glob("*trap-step*")) == []
    assert str(bundle) in told
    model = halves()
    model.body.spoilt = True
    diagnosis = gradsurgeon.replay(bundle, model)
    assert str(diagnosis).splitlines()[0] == BORN
    assert diagnosis.rank == 1
    assert diagnosis.inputs[0].dtype == "bfloat16"
