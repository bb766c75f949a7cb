"""A threshold means what it says: every set-up ends with the weights of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.p5_worker import ACTIONS, PROCESSES, VARIANTS
from ranks import FINAL_WEIGHTS, run_ranks

TOLERANCE = 1e-6
Weights = list[list[float]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    worker = Path(__file__).with_name("p5_worker.py")
    return run_ranks(worker, tmp_path_factory.mktemp("p5") / "ends")


def largest_difference(left: Weights, right: Weights) -> float:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


@pytest.mark.cell("one process", "step")
@pytest.mark.cell("one process, fused optimizer", "step")
@pytest.mark.cell("accumulation", "step")
@pytest.mark.cell("GradScaler", "step")
@pytest.mark.cell("GradScaler, fused optimizer", "step")
@pytest.mark.cell("GradScaler and accumulation", "step")
@pytest.mark.cell("DDP", "step")
@pytest.mark.cell("FSDP2 (`fully_shard`)", "step")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("process", PROCESSES)
def test_step_rules_mean_the_same(
    ends: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
    process: str,
    variant: str,
    action: str,
) -> None:
    wanted = ends[0][f"one process | plain | {action}"]
    for rank in ends:
        found = rank[f"{process} | {variant} | {action}"]
        gap = largest_difference(found, wanted)
        bite = largest_difference(found, rank[f"{process} | {variant} | no rules"])
        text = f"{gap:.1e} / {bite:.1e}"
        record_property(FINAL_WEIGHTS, (f"{process}, {variant}", action, text))
        assert gap < TOLERANCE
        # A rule that does nothing would pass as well.
        assert bite > 100 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("process", PROCESSES)
def test_the_set_ups_themselves_agree(
    ends: list[dict[str, Any]], process: str, variant: str
) -> None:
    wanted = ends[0]["one process | plain | no rules"]
    for rank in ends:
        found = rank[f"{process} | {variant} | no rules"]
        assert largest_difference(found, wanted) < TOLERANCE
