"""What a device adds: hooks that run in its thread, and reads by the host that cost a wait. On a device made of Python."""

from __future__ import annotations

import json
from typing import Any

import forks
import numpy as np
import pytest
from bounds import TIMEOUT
from commands import ROOT, environment
from ranks import Json

from benchmarks import kernels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told() -> Json:
    """What the cases have found; in a process of its own, since a device stays registered."""
    cases = str(ROOT / "tests" / "device_cases.py")
    done = forks.start([cases], cwd=ROOT, env=environment()).wait(TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    found: Json = json.loads(done.stdout)
    return found


def case(told: Json, name: str) -> Any:
    found = told[name]
    assert "error" not in found, found["error"]
    return found


def test_what_a_device_is_asked_to_do_is_counted(told: Json) -> None:
    def work(
        read: int, written: int, *, allocations: int = 0, lists: int = 0, operations: int = 1
    ) -> dict[str, int]:
        counts = {
            "operations": operations,
            "list_operations": lists,
            "bytes_read": read,
            "bytes_written": written,
            "allocations": allocations,
        }
        return {key: count for key, count in counts.items() if count}

    assert case(told, "operations") == {
        "add": work(16, 16, allocations=1),
        "add_": work(16, 16),
        "zero_": work(0, 16),
        "copy_": work(16, 16),
        "expanded": work(8, 4, allocations=1),
        "views": {},
        "empty": {"allocations": 1},
        "zeros": work(0, 16, allocations=1),
        "foreach": work(28, 28, lists=1),
        "norms": work(28, 8, allocations=2, lists=1),
        "cat": work(28, 28, allocations=1, lists=1),
        "item": {"host_reads": 1},
        "tolist": {"host_reads": 1},
        "cpu": {"host_reads": 1},
        "copy to host": {"host_reads": 1},
        "to host, later": {"copies_to_host": 1},
        "copy to host, later": {"copies_to_host": 1},
        "from host": {"copies_from_host": 1},
        "copy from host": {"copies_from_host": 1},
    }


def test_norms_on_a_device_come_in_the_order_of_the_gradients(told: Json) -> None:
    for order, (wanted, together, alone) in case(told, "norms").items():
        assert together == pytest.approx(wanted, rel=1e-5), order
        assert alone == pytest.approx(wanted, rel=1e-5), order


def test_all_rules_do_on_a_device_what_they_do_on_the_host(told: Json) -> None:
    found = case(told, "same_as_on_the_host")
    host, device = found["host"], found["device"]
    assert device["weights"] == host["weights"]
    assert device["events"] == host["events"]
    kinds = [(kind, step) for kind, step, _ in host["events"]]
    # Adam cancels the scale.
    assert kinds == [("notice", 0), ("trap", 3), ("skipped-step", 3)]
    assert device["status"] == host["status"]
    assert device["histograms"] == host["histograms"]
    assert len(host["histograms"]) == 6
    for rule, values in host["records"].items():
        assert len(values) == 5
        assert device["records"][rule] == pytest.approx(values)


def test_losses_are_combined_on_a_device_as_on_the_host(told: Json) -> None:
    found = case(told, "losses")
    host, device = found["host"], found["device"]
    assert device["weights"] == pytest.approx(host["weights"], rel=1e-4)
    assert device["cosine"] == pytest.approx(host["cosine"], rel=1e-4)
    for one, other in zip(device["grads"], host["grads"], strict=True):
        assert np.allclose(one, other, rtol=1e-4)


def test_gradients_that_arrive_in_two_threads_at_once_are_all_noticed(told: Json) -> None:
    found = case(told, "two_threads")
    assert found["events"] == []
    assert found["steps"] == [4] * 6
    assert found["rows"] == [[4] * 8] * 6


def test_the_host_waits_where_a_trap_decides_and_only_then(told: Json) -> None:
    # Of four steps each. A histogram has 66 rows, 128 rows are sent at once, and only CUDA can do that while the host goes on.
    assert case(told, "host_reads") == {
        "norms": 0,
        "histograms": 2,
        "edits": 0,
        "trap": 4,
        "everything": 6,
        "by hand": 0,
    }


def test_half_precision_is_scaled_by_factors_that_nobody_has_rounded(told: Json) -> None:
    found = case(told, "half_precision")
    plain, cast = found["fp16, cast False"], found["fp16, cast True"]
    assert cast == plain
    assert cast["finite"]
    assert cast["moved"]
    assert cast["record"] == pytest.approx(1.248e-6, rel=1e-2)
    assert found["torch.bfloat16"]["off"] == found["torch.float16"]["off"] == 0.0
    assert found["torch.float32"]["off"] < 1e-6


def test_a_device_is_asked_for_no_private_operation_that_cuda_refuses(told: Json) -> None:
    found, table = told["private_operations"], kernels.read()
    assert isinstance(found, list), found["error"]
    refused = [(name, dtype) for name, dtype in found if table[name][dtype] == kernels.REFUSES]
    assert refused == []
    assert {name for name, _ in found} == table.keys()
    assert {dtype for _, dtype in found} == {"float32", "bfloat16", "float16", "float64"}


# -------------------------------------------------------------------------------------------------
# What only CUDA does, as torch would tell of it: it captures a graph, or an assert of a kernel fails.
# -------------------------------------------------------------------------------------------------


def test_while_a_graph_is_captured_a_pack_asks_the_device_for_nothing(told: Json) -> None:
    found = case(told, "captured")
    *_, before, captured, after = found["reads"]
    assert (before, captured, after) == (1, 0, 1)
    said = "a CUDA graph is being captured: no rule acts during the capture, nor in its replays"
    assert [line.endswith(said) for line in found["lines"]].count(True) == 1


@pytest.mark.parametrize("where", ["failed", "failed_at_the_update"])
def test_a_device_that_fails_is_a_sentence_and_what_had_arrived_is_kept(
    where: str, told: Json
) -> None:
    found = case(told, where)
    steps, lines = found["steps"], found["lines"]
    # Rows travel every 64 steps, or with the clock of the run directory.
    assert steps == list(range(steps[-1] + 1))
    assert steps[-1] < 70
    assert lines[-1] == (
        "gradsurgeon: error: Sequential: the device failed (CUDA error: device-side assert triggered); "
        f"CUDA_LAUNCH_BLOCKING=1 shows where; records up to step {steps[-1]} are kept"
    )
    assert "gradsurgeon: Sequential, 70 steps" in lines
    assert any(line.startswith("  debug-nans   nan-trap  checked 70 updates") for line in lines)
    assert found["ended"] == "broken: stopped by AcceleratorError"


def test_a_session_that_a_device_ends_raises_no_second_error(told: Json) -> None:
    found = case(told, "failed_under_apply")
    assert found["context"] == "None"
    assert found["steps"] == 64
    (text,) = found["told"]
    assert text.endswith("; records up to step 63 are kept")


def test_weights_of_each_device_that_do_not_move_are_told(told: Json) -> None:
    (message,) = case(told, "weights_on_two_devices")
    assert "0.weight, 0.bias, 1.weight and 3 more did not move" in message
