"""A threshold means what it says: every set-up ends with the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.p5_worker import ACTIONS, PROCESSES, VARIANTS
from pairs import covering, rows
from ranks import FINAL_WEIGHTS, Weights, largest_difference, run_ranks

TOLERANCE = 1e-6
Ends = list[dict[str, Weights]]
# The quick suite has every process, variant and action in a case, the slow suite every pair of them.
PAIRS = rows([list(PROCESSES), list(VARIANTS), list(ACTIONS)])


def cases(chosen: list[tuple[int, ...]]) -> list[tuple[str, str, str]]:
    """Return the process, variant and action of each case."""
    return [(PROCESSES[i], VARIANTS[j], list(ACTIONS)[k]) for i, j, k in chosen]


QUICK = cases(covering(PAIRS))
REST = [case for case in cases(PAIRS) if case not in QUICK]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run(tmp_path_factory.mktemp("rest"), REST)


def run(folder: Path, chosen: list[tuple[str, str, str]]) -> Ends:
    """Train on two ranks, and return by rank the weights at the end of each training."""
    words = [" | ".join(case) for case in chosen]
    return run_ranks(Path(__file__).with_name("p5_worker.py"), folder / "ends", words=words)


@pytest.mark.cell("one process", "step")
@pytest.mark.cell("one process, fused optimizer", "step")
@pytest.mark.cell("accumulation", "step")
@pytest.mark.cell("GradScaler", "step")
@pytest.mark.cell("GradScaler, fused optimizer", "step")
@pytest.mark.cell("GradScaler and accumulation", "step")
@pytest.mark.cell("DDP", "step")
@pytest.mark.cell("FSDP2 (`fully_shard`)", "step")
@pytest.mark.parametrize(("process", "variant", "action"), QUICK)
def test_step_rules_mean_the_same(
    quick: Ends,
    record_property: Callable[[str, object], None],
    process: str,
    variant: str,
    action: str,
) -> None:
    record_property(FINAL_WEIGHTS, compared(quick, process, variant, action))


@pytest.mark.slow
@pytest.mark.parametrize(("process", "variant", "action"), REST)
def test_step_rules_mean_the_same_in_every_pair(
    rest: Ends,
    record_property: Callable[[str, object], None],
    process: str,
    variant: str,
    action: str,
) -> None:
    record_property(FINAL_WEIGHTS, compared(rest, process, variant, action))


def compared(ends: Ends, process: str, variant: str, action: str) -> tuple[str, str, str]:
    """Compare the weights of each rank with those of one process; return a row of the table of differences."""
    wanted = ends[0][f"one process | plain | {action}"]
    for rank in ends:
        found = rank[f"{process} | {variant} | {action}"]
        gap = largest_difference(found, wanted)
        bite = largest_difference(found, rank[f"{process} | {variant} | no rules"])
        assert gap < TOLERANCE
        # A rule that does nothing would pass as well.
        assert bite > 100 * TOLERANCE
    return f"{process}, {variant}", action, f"{gap:.1e} / {bite:.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("process", PROCESSES)
def test_the_set_ups_themselves_agree(quick: Ends, process: str, variant: str) -> None:
    wanted = quick[0]["one process | plain | no rules"]
    for rank in quick:
        found = rank[f"{process} | {variant} | no rules"]
        assert largest_difference(found, wanted) < TOLERANCE
