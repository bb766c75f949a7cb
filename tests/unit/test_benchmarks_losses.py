"""What it costs to see several losses apart: each way runs and makes the gradients it should. No timing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import losses, losses_page, measure
from benchmarks.machine import EXTRA

# Of benchmarks, which users need not run, `test_benchmarks` shows enough in the quick storey.
pytestmark = pytest.mark.slow

ONCE = measure.Budget(rounds=2, seconds=0.0, least=2)
SMALL_TRUNK = losses.Trunk("small", "two layers of 6", lambda: losses.mlp(6, 2), 6, (5, 6))
ALL_WAYS = (*losses.BARE, *losses.WAYS)


@pytest.mark.parametrize("number", losses.LOSSES)
def test_losses_can_be_seen_apart_in_every_way(number: int) -> None:
    pytest.importorskip("torchjd", reason="of the extra `bench`")
    rows = list(losses.of_trunk(SMALL_TRUNK, number, "cpu", ONCE, ALL_WAYS))
    assert [one["case"] for one in rows] == [way.name for way in ALL_WAYS]
    assert [one for one in rows if "skipped" in one] == []
    found = {one["case"]: one for one in rows}
    assert found[losses.AGAIN]["peak_bytes"] == 0
    # One gradient of the trunk per loss is kept at least.
    unit = 2 * (6 * 6 + 6) * 4
    assert {one["trunk_bytes"] for one in rows} == {unit}
    assert found["`combine`, `upgrad`"]["peak_bytes"] >= number * unit
    json.dumps(rows)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (losses.AGAIN, losses.WITHOUT),
        (losses.AGAIN, "`conflict`"),
        ("`combine`, `upgrad`", "TorchJD `mtl_backward`, `UPGrad`"),
        ("`combine`, `upgrad`", "the same, `parallel_chunk_size=1`"),
        ("`combine` on features, `upgrad`", "TorchJD on features by hand, `UPGrad`"),
    ],
)
def test_ways_that_are_compared_make_the_same_gradients(first: str, second: str) -> None:
    pytest.importorskip("torchjd", reason="of the extra `bench`")
    ways, found = {way.name: way for way in ALL_WAYS}, []
    for name in (first, second):
        task = losses.Task(SMALL_TRUNK, 3, "cpu")
        backward, detach = ways[name].attach(task)
        backward()
        detach()
        found.append([param.grad for param in task.model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def failing_way(_: object) -> Any:
    def boo() -> None:
        raise RuntimeError("boo")

    return boo, boo


def test_a_way_of_others_that_is_missing_or_fails_is_a_row_that_says_so() -> None:
    ways = [
        losses.Way("absent", "peer", failing_way, ("no-such-package-at-all",)),
        losses.Way("broken", "peer", failing_way),
        losses.BARE[0],
    ]
    rows = list(losses.of_trunk(SMALL_TRUNK, 2, "cpu", ONCE, ways))
    told = [one.get("skipped") for one in rows]
    assert told == [
        f"needs no-such-package-at-all: {EXTRA}",
        "did not run: RuntimeError: boo",
        None,
    ]
    with pytest.raises(RuntimeError, match="boo"):
        ours = [losses.Way("ours", "rules", failing_way)]
        list(losses.of_trunk(SMALL_TRUNK, 2, "cpu", ONCE, ours))


@pytest.mark.parametrize(
    ("trunk", "elements"),
    list(zip(losses.TRUNKS, (1_575_936, 6_297_600, 793_088), strict=True)),
    ids=lambda one: getattr(one, "name", None),
)
def test_trunks_have_the_sizes_that_the_tables_name(trunk: losses.Trunk, elements: int) -> None:
    with torch.device("meta"):
        assert sum(param.numel() for param in trunk.build().parameters()) == elements
    assert trunk.about.startswith(f"{elements / 1e6:.1f} M in ")


def test_losses_are_shown_by_trunk_with_two_numbers_for_each_number_of_losses() -> None:
    spread = {"median": 2.0, "low": 1.5, "high": 2.5, "count": 9}
    rows = [
        {
            "group": losses.GROUP, "workload": "mlp", "losses": count, "case": case, "kind": "rules",
            "base_us": spread, "step_ratio": spread, "peak_bytes": 30 * count, "trunk_bytes": 10,
        }
        for count in (2, 8)
        for case in ("ours", "theirs")
    ]  # fmt: skip
    rows[-1] = {key: rows[-1][key] for key in ("group", "workload", "losses", "case", "kind")}
    rows[-1]["skipped"] = "needs it"
    text = losses_page.tables(rows)
    assert text.startswith(f"**mlp**: {losses.TRUNKS[0].about}; the plain step takes 2.00 us at 2,")
    assert "|  | 2 losses: x step | 2 losses: memory | 8 losses: x step | 8 losses:" in text
    ratio = "2.00 (1.50 to 2.50)"
    assert f"| ours | {ratio} | 6.00 | {ratio} | 24.0 |" in text
    assert f"| theirs | {ratio} | 6.00 | needs it |  |" in text
