"""Sharded models: rules mean the whole gradient, or refuse and name what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.sharded_worker import STATS
from ranks import Ranks

pytestmark = pytest.mark.cover_children

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


RECORDS = [
    *((point, stat) for point in ("accumulated", "step", "value", "update") for stat in STATS),
    *(("projection", stat) for stat in ("projection_1", "projection_2", "numel")),
    *(("update", stat) for stat in ("ratio", "moved")),
]


@pytest.mark.cell("FSDP2 (`fully_shard`)", "accumulated", "step")
@pytest.mark.parametrize(("what", "stat"), RECORDS)
def test_fsdp2_records_are_of_the_whole_gradient(ranks: Ranks, what: str, stat: str) -> None:
    for rank in ranks:
        whole, sharded = (rank["statistics"][f"{kind} {what}"] for kind in ("whole", "sharded"))
        for name in NAMES:
            values = whole[f"{name} {stat}"]
            assert len(values) == 3
            assert sharded[f"{name} {stat}"] == pytest.approx(values, rel=1e-5, abs=1e-7)


def test_fsdp2_histograms_are_those_of_whole_gradients(ranks: Ranks) -> None:
    for rank in ranks:
        whole, sharded = (rank["statistics"][f"{kind} histogram"] for kind in ("whole", "sharded"))
        assert len(whole) == 66 * len(NAMES)
        assert sharded == whole
        for name in NAMES:
            assert any(whole[f"{name} histogram_{place:02}"] != [0.0] * 3 for place in range(64))


def test_fsdp2_numbers_of_all_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    for rank in ranks:
        whole, sharded = rank["together"]["whole"], rank["together"]["sharded"]
        for stat, values in whole.items():
            assert len(values) == 3
            assert [step for step, _ in sharded[stat]] == [0, 1, 2]
            for (_, one), (_, other) in zip(sharded[stat], values, strict=True):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-7), stat


def test_fsdp2_weights_are_edited_as_whole_ones(ranks: Ranks) -> None:
    for rank in ranks:
        both = rank["edited_weights"]
        assert both["whole"].keys() == both["sharded"].keys()
        for name, weights in both["whole"].items():
            assert torch.allclose(
                torch.tensor(both["sharded"][name]), torch.tensor(weights), atol=1e-6
            )


def test_a_run_directory_has_records_of_whole_gradients_on_the_lowest_rank(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        assert rank["recorded"]["ranks"] == {"0.weight": [0], "2.bias": [0]}
        for key, whole in rank["statistics"]["whole accumulated"].items():
            assert rank["recorded"]["run"][key] == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_records_of_shards_are_asked_for_on_all_ranks_together(ranks: Ranks) -> None:
    alone = ranks[0]["recorded"]["alone"]
    assert alone["kind"] == "RecordError"
    assert alone["text"].startswith(
        "0.weight is shared by ranks 0, 1, and rank 1 did not ask for this record within 0.5 s"
    )
    # Once the session is over there is nobody to ask on other ranks.
    assert ranks[0]["recorded"]["after"] == {"kind": "", "text": ""}
    assert ranks[1]["recorded"]["after"] == {
        "kind": "RecordError",
        "text": "0.weight is shared by ranks 0, 1, and rank 0 keeps its records: ask there",
    }


@pytest.mark.parametrize("point", ["accumulated", "step"])
def test_fsdp2_captures_are_of_the_whole_gradient(ranks: Ranks, point: str) -> None:
    for rank in ranks:
        whole, sharded = (rank["captured"][f"{kind} {point}"] for kind in ("whole", "sharded"))
        assert list(whole) == list(sharded) == NAMES
        for name in NAMES:
            assert sharded[name] == pytest.approx(whole[name], abs=1e-6)


def test_fsdp2_mixed_precision_is_clipped_to_the_whole_norm(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["mixed_precision"]["norm"] == pytest.approx(0.01, rel=1e-3)
        assert rank["mixed_precision"]["fired"] == 8


def test_sharding_between_apply_and_the_first_update_is_no_news(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        late = rank["late"]
        assert late["warnings"] == []
        assert late["events"] == []
        assert late["fired"] == {"log": 12, "trap": 3, "zero": 6}
        assert late["moved"] == [False, False, True, True]
        wanted = rank["statistics"]["whole accumulated"]["0.weight l2"][:1]
        assert [step for step, _ in late["norms"]] == [0, 1, 2]
        assert late["norms"][0][1] == pytest.approx(wanted[0], rel=1e-5)


def test_sharding_between_two_updates_loses_the_rules(ranks: Ranks) -> None:
    for rank in ranks:
        (warning,) = rank["late"]["lost"]
        assert warning.startswith("0.weight, 0.bias, 2.weight and 1 more: each was replaced")
        assert warning.endswith("Apply the rules again with replace=True")


@pytest.mark.cell(
    "FSDP2 (`fully_shard`)",
    "backward",
    refused="no hook sees the contribution of one pass to a sharded parameter: use `at: step`, or `at: accumulated` to look",
)
@pytest.mark.parametrize(
    ("action", "remedy"),
    [("clamp", "use `at: step`"), ("norm-log", "use `at: accumulated`"), ("sanitize", "`exclude`")],
)
def test_fsdp2_contributions_are_refused(ranks: Ranks, action: str, remedy: str) -> None:
    for rank in ranks:
        refused = rank["refused"][action]
        assert refused["kind"] == "BindError"
        assert "rule early: 4 parameters are divided by fully_shard (0.weight" in refused["text"]
        assert remedy in refused["text"]


def test_sharding_after_apply_is_refused_where_contributions_were_meant(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        refused = rank["late"]["refused"]
        assert refused["kind"] == "BindError"
        assert "rule early: 4 parameters are divided by fully_shard" in refused["text"]


@pytest.mark.cell(
    "FSDP1 (`FullyShardedDataParallel`)",
    "backward",
    "accumulated",
    "step",
    "modules",
    refused="flat parameters pass no hook and have no whole norms: shard with `fully_shard`",
)
@pytest.mark.parametrize(
    "how", ["FSDP1", "FSDP1 modules", "FSDP1 later, True", "FSDP1 later, False"]
)
def test_flat_parameters_are_refused(ranks: Ranks, how: str) -> None:
    for rank in ranks:
        refused = rank["refused"][how]
        assert refused["kind"] == "BindError"
        assert "torch.distributed.fsdp.fully_shard" in refused["text"]


def test_flat_parameters_below_a_model_belong_to_a_module(ranks: Ranks) -> None:
    assert [rank["above_flat_parameters"] for rank in ranks] == [[], []]


@pytest.mark.cell("tensor parallel", "accumulated", "step", "modules")
@pytest.mark.cell("tensor parallel", "backward")
@pytest.mark.parametrize("point", ["step", "spikes", "backward", "modules"])
def test_tensor_parallel_rules_mean_the_whole_parameter(ranks: Ranks, point: str) -> None:
    for rank in ranks:
        whole, divided = (rank["tensor_parallel"][f"{point} {k}"] for k in ("whole", "divided"))
        for one, other in zip(whole["weights"], divided["weights"], strict=True):
            assert other == pytest.approx(one, abs=1e-6)
        bare = rank["tensor_parallel"]["nothing whole"]["weights"]
        gaps = [
            abs(a - b)
            for x, y in zip(whole["weights"], bare, strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        assert max(gaps) > 1e-4
        for key, values in whole["told"].items():
            assert divided["told"][key] == pytest.approx(values, rel=1e-4, abs=1e-6), key


@pytest.mark.cell(
    "tensor parallel",
    "backward",
    refused="norms and statistics, and bounds on gradients that still await a sum over ranks: use `at: step`",
)
def test_tensor_parallel_contributions_are_refused_where_ranks_would_have_to_meet(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        found = rank["tensor_parallel"]
        assert found["refused"]["kind"] == "BindError"
        assert "rule c: 6 parameters are divided by tensor parallel" in found["refused"]["text"]
        assert found["pending"]["text"].startswith(
            "rule b: norm.weight gets an addend that awaits a sum over ranks"
        )


def test_a_rule_that_only_records_calls_no_collective_for_a_sum_over_ranks(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        whole, divided = (rank["tensor_parallel"][f"nothing {k}"] for k in ("whole", "divided"))
        for key, values in whole["told"].items():
            # The gradients of the norm await the sum: a rank without the rule would let the others wait.
            wanted: Any = (
                [] if key.startswith("norm.") else pytest.approx(values, rel=1e-4, abs=1e-6)
            )
            assert divided["told"][key] == wanted, key
        ((rule, notice),) = divided["notices"]
        assert rule == "only"
        assert notice.startswith("has no records of norm.weight, norm.bias: these gradients await")
        assert "await" not in str(rank["tensor_parallel"]["step divided"]["notices"])


@pytest.mark.cell("`ZeroRedundancyOptimizer`", "backward", "accumulated", "step", "modules")
@pytest.mark.parametrize("how", ["named", "found"])
def test_an_optimizer_inside_an_optimizer_acts_once(ranks: Ranks, how: str) -> None:
    for rank in ranks:
        found = rank["redundancy"]
        assert found[how]["weights"] == found["plain"]["weights"]
        assert found[how]["weights"] != found["without"]["weights"]
        assert found[how]["step"] == 3
        assert found[how]["fired"] == 12
        assert found[how]["logged"] == [0, 1, 2]
