"""What a device adds: hooks that run in its thread, and reads by the host that cost a wait."""

from __future__ import annotations

import json
from typing import Any

import forks
import pytest
from bounds import TIMEOUT
from commands import ROOT, environment


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the cases have found; in a process of its own, since a device stays registered."""
    cases = str(ROOT / "tests" / "device_cases.py")
    done = forks.start([cases], cwd=ROOT, env=environment()).wait(TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def case(told: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = told[name]
    assert "error" not in found, found["error"]
    return found


def test_all_rules_do_on_a_device_what_they_do_on_the_host(told: dict[str, Any]) -> None:
    found = case(told, "same_as_on_the_host")
    host, device = found["host"], found["device"]
    assert device["weights"] == host["weights"]
    assert device["events"] == host["events"]
    assert [(kind, step) for kind, step, _ in host["events"]] == [("trap", 3), ("skipped-step", 3)]
    assert device["status"] == host["status"]
    for rule, values in host["records"].items():
        assert len(values) == 5
        assert device["records"][rule] == pytest.approx(values)


def test_gradients_that_arrive_in_two_threads_at_once_are_all_noticed(told: dict[str, Any]) -> None:
    found = case(told, "two_threads")
    assert found["events"] == []
    assert found["steps"] == [4] * 6
    assert found["rows"] == [[4] * 8] * 6


def test_the_host_waits_where_a_trap_decides_and_only_then(told: dict[str, Any]) -> None:
    # Of four steps each.
    assert case(told, "host_reads") == {
        "norms": 0,
        "edits": 0,
        "trap": 4,
        "everything": 4,
        "by hand": 0,
    }


def test_half_precision_is_scaled_by_factors_that_nobody_has_rounded(told: dict[str, Any]) -> None:
    found = case(told, "half_precision")
    plain, cast = found["fp16, cast False"], found["fp16, cast True"]
    assert cast == plain
    assert cast["finite"]
    assert cast["moved"]
    assert cast["record"] == pytest.approx(1.248e-6, rel=1e-2)
    assert found["torch.bfloat16"]["off"] == found["torch.float16"]["off"] == 0.0
    assert found["torch.float32"]["off"] < 1e-6
