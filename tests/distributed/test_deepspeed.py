"""Engines of DeepSpeed: rules see what the engine is about to consume, or refuse and name what to do instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bounds import TIMEOUT
from ranks import Ranks, free_port

from gradsurgeon.common._libraries import is_installed

pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"),
    reason="DeepSpeed is not installed, see the extra `deepspeed` in pyproject.toml",
)

SCRIPT = Path(__file__).with_name("deepspeed_script.py")
STAGES = [0, 1, 2, 3]
DIVIDED = [1, 2, 3]
WATCHED = [*(f"records {stage}" for stage in STAGES), *(f"clipped {stage}" for stage in STAGES)]
SCALED = [f"scaled {stage}" for stage in DIVIDED]


@pytest.mark.cell("DeepSpeed, ZeRO 0", "accumulated")
@pytest.mark.cell("DeepSpeed, ZeRO 1", "accumulated", "step")
@pytest.mark.cell("DeepSpeed, ZeRO 2", "accumulated", "step")
@pytest.mark.cell("DeepSpeed, ZeRO 3", "accumulated", "step")
@pytest.mark.parametrize("training", [*WATCHED, *SCALED])
def test_observing_changes_nothing_and_finds_no_fault(ranks: Ranks, training: str) -> None:
    for rank in ranks:
        found = rank[training]
        assert found["watched"] == found["plain"]
        assert found["step"] == 4
        assert found["events"] == []
        assert "DeepSpeed averages gradients" in found["plan"]


@pytest.mark.cell(
    "DeepSpeed, ZeRO 0",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 1",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 2",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 3",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.parametrize("training", [*WATCHED, *SCALED])
def test_tensors_of_modules_are_those_of_a_rank(ranks: Ranks, training: str) -> None:
    own, other = (rank[training]["outputs"] for rank in ranks)
    assert len(own) == len(other) == 8
    assert own != other


@pytest.mark.parametrize("training", [*WATCHED, *SCALED])
def test_each_record_is_of_the_whole_average(ranks: Ranks, training: str) -> None:
    for rank in ranks:
        found = rank[training]
        assert [step for step, _ in found["loss"]] == [0, 1, 2, 3]
        for rule in ("at-accumulated", "at-step", "patterns", "weights", "updates"):
            assert found[rule] == ranks[0][training][rule]
            for name, records in found[rule].items():
                assert [step for step, _ in records] == [0, 1, 2, 3], (rule, name)
        if training.endswith("0"):
            continue
        assert found["at-accumulated"] == found["at-step"]


@pytest.mark.parametrize("training", [*WATCHED, *SCALED])
def test_the_whole_norm_is_that_of_the_engine(ranks: Ranks, training: str) -> None:
    for rank in ranks:
        found = rank[training]
        norms = [norm for _, norm in found["together"]["together"]]
        if training.endswith("0"):
            assert found["norms"] == [None] * 4
            assert norms == pytest.approx(found["totals"], rel=1e-4)
        else:
            assert norms == pytest.approx(found["norms"], rel=1e-6)


@pytest.mark.cell(
    "DeepSpeed, ZeRO 0",
    "backward",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 1",
    "backward",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 2",
    "backward",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 3",
    "backward",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.parametrize("stage", STAGES)
def test_edits_at_backward_act(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        norms = rank[f"edits {stage}"]
        for name, records in norms.items():
            are_zero = [norm == 0.0 for _, norm in records]
            assert are_zero == [name.startswith("2.")] * 4, name


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_of_one_rank_is_told_with_its_step_and_source(ranks: Ranks, stage: int) -> None:
    innocent, guilty = (rank[f"traps {stage}"] for rank in ranks)
    for found in (innocent, guilty):
        kind, step, text = found["events"][0]
        assert (kind, step) == ("trap", 2)
        assert "are not finite" in text
        assert found["step"] == 4
        assert not any("the script" in text for _, _, text in found["events"])
        # Without a loss scale, ZeRO leaves such an update out by itself.
        left_out = [step for kind, step, _ in found["events"] if kind == "skipped-step"]
        assert left_out == [2] * found["skipped"]
        assert found["skipped"] == (1 if stage else 0)
    assert "the input of the root (Sequential) was not finite" in guilty["events"][0][2]
    if stage == 3:
        assert "divided over ranks" in innocent["events"][0][2]
        assert "partial because the parameters are divided over ranks" in guilty["events"][0][2]
    else:
        assert "came from another rank" in innocent["events"][0][2]
    if stage in (1, 2):
        # This rank has no part of the last bias, and knows nothing of it.
        assert "2.bias" not in innocent["events"][0][2]


@pytest.mark.parametrize("stage", DIVIDED)
def test_an_overflow_is_an_event_and_no_trap(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        found = rank[f"skips {stage}"]
        kinds = [kind for kind, _, _ in found["events"] if kind != "notice"]
        assert kinds == ["scaler-skip"]
        assert found["skipped"] == 1
        assert found["step"] == 4


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_stop_before_a_weight_moves(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        found = rank[f"raises {stage}"]
        assert "stopped before the update: no weight was moved" in found["error"]
        assert "the input of the root (Sequential) was not finite" in found["error"] or stage == 0
        assert found["kept"]


@pytest.mark.cell("DeepSpeed, ZeRO 0", "step")
def test_in_zero_0_rules_at_step_act(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["acts"] == {
            "freeze": [True, True],
            "skip": [False, True],
            "clip": [False, True],
            "edit": [False, True],
        }


INSTEAD = {
    "freeze": "set requires_grad to False before `deepspeed.initialize`",
    "skip": "`check_grad_overflow`",
    "clip": "`gradient_clipping`",
    "edit": "use `at: backward`",
}


@pytest.mark.cell(
    "DeepSpeed, ZeRO 1",
    "step",
    refused="`freeze`, `then: skip-step`, `spike-trap`, `capture`, and all edits: see [DeepSpeed](ranks.md#deepspeed)",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 2",
    "step",
    refused="`freeze`, `then: skip-step`, `spike-trap`, `capture`, and all edits: see [DeepSpeed](ranks.md#deepspeed)",
)
@pytest.mark.cell(
    "DeepSpeed, ZeRO 3",
    "step",
    refused="`freeze`, `then: skip-step`, `spike-trap`, `capture`, and all edits: see [DeepSpeed](ranks.md#deepspeed)",
)
@pytest.mark.parametrize("stage", DIVIDED)
def test_rules_without_room_are_refused_before_the_first_step(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        found: dict[str, Any] = rank[f"refusals {stage}"]
        for rule, instead in INSTEAD.items():
            assert instead in found[rule]
            assert found[f"{rule} kept"]
        assert [("rule skip: only warns: " in line) for line in found["pack"]] == [True]


@pytest.mark.cell(
    "DeepSpeed, ZeRO 0", "step", refused="in half precision `freeze` and `then: skip-step`"
)
def test_in_zero_0_half_precision_leaves_no_room_to_hide_gradients(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["refusals 0"]
        for rule in ("freeze", "skip"):
            assert INSTEAD[rule] in found[rule]
            assert found[f"{rule} kept"]
        assert (found["clip"], found["edit"]) == ("", "")
        assert [("rule skip: only warns: " in line) for line in found["pack"]] == [True]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_is_made_later_counts_its_own_updates(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        found = rank[f"later {stage}"]
        assert found["step"] == 4
        (text,) = found["events"]
        assert text.startswith("DeepSpeed averages gradients")


def test_a_script_under_the_launcher_has_the_names_of_its_model(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        'version: 1\nrules: [{id: norms, action: norm-log, params: ["0.*", "2.bias"]}]\n',
        encoding="utf-8",
    )
    run = [sys.executable, "-m", "gradsurgeon", "run", "--rules", str(rules), str(SCRIPT)]
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert "on Sequential (4 parameters, 161 elements" in done.stderr
    row = ["norms", "norm-log", "3", "12"]  # matched and fired
    assert row in [line.split()[:4] for line in done.stderr.splitlines()]
    assert "in no module" not in done.stderr
    assert "never fired" not in done.stderr
