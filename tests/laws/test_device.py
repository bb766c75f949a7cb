"""What rules may ask of a device per step, counted on one made of Python. No timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from bounds import TIMEOUT
from commands import ROOT, environment

from benchmarks import device_counts, kernels, rule_sets

FEW, MANY = 4, 12
ONE, TWO = ("float32",), ("float32", "bfloat16")
OBSERVE, CLIP_IDLE, CLIP_BITES = rule_sets.OBSERVE, rule_sets.CLIP_IDLE, rule_sets.CLIP_BITES
# One measurement or decision over all gradients: as much work for the host, however many there are.
TOGETHER = [
    OBSERVE,
    CLIP_IDLE,
    CLIP_BITES,
    rule_sets.IDLE,
    "nan-trap",
    "nan-trap, skip-step",
    "nan-trap, warn",
    "norm-log at accumulated",
    "norm-log at step",
    "clip-norm at step, per rule",
    "clip-norm at step, per rule, does not bite",
    "freeze at step",
    "spike-trap",
    "spike-trap, skip-step",
]
ON_MODULES = [*rule_sets.on_modules()]
# Whose work grows with the tensors, one after the other: at most so many operations for each.
PER_TENSOR = {
    "norm-log at backward": 1,
    "norm-log on every module's output": 1,
    "norm-log on every module's output.grad": 1,
    "norm-log on every module's input.grad": 1,
    "capture at accumulated": 1,
    "capture at backward": 1,
    "capture at step": 1,
    "spike-trap, per parameter": 1,
}
EDITS = [
    f"{action} at {point}"
    for action in ("clamp", "scale", "zero")
    for point in ("step", "backward")
]
READING = {OBSERVE, CLIP_IDLE, CLIP_BITES, "nan-trap on every module's output"}

Counts = dict[tuple[str, int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """What each case adds to a step, by case, parameters and dtypes."""
    out = tmp_path_factory.mktemp("counts") / "counts.json"
    names = [*TOGETHER, *PER_TENSOR, *ON_MODULES, *EDITS, device_counts.CLIP]
    request = json.dumps(
        [[[(FEW, ONE), (MANY, ONE)], names], [[(FEW, TWO), (MANY, TWO)], TOGETHER]]
    )
    words = ["-m", "benchmarks.device_worker", str(out), request]
    done = forks.start(words, cwd=ROOT, env=environment()).wait(TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    rows = json.loads(Path(out).read_text(encoding="utf-8"))
    return {(row["case"], row["params"], row["dtypes"]): row for row in rows}


def asked(counts: Counts, case: str, params: int, dtypes: tuple[str, ...] = ONE) -> dict[str, Any]:
    return counts[case, params, device_counts.label(dtypes)]


def test_the_host_reads_once_where_a_rule_decides_and_never_elsewhere(counts: Counts) -> None:
    for (case, params, dtypes), row in counts.items():
        decides = case in READING or case.startswith("nan-trap") or "skip-step" in case
        assert row["host_reads"] == decides, (case, params, dtypes)


def test_nothing_is_brought_to_the_device(counts: Counts) -> None:
    assert {key: row["copies_from_host"] for key, row in counts.items()} == dict.fromkeys(counts, 0)


@pytest.mark.parametrize("dtypes", [ONE, TWO], ids=device_counts.label)
@pytest.mark.parametrize("case", TOGETHER)
def test_operations_do_not_grow_with_the_parameters(
    case: str, dtypes: tuple[str, ...], counts: Counts
) -> None:
    few, many = (asked(counts, case, params, dtypes) for params in (FEW, MANY))
    for key in ("operations", "list_operations"):
        assert many[key] == few[key], key


@pytest.mark.parametrize(("case", "most"), PER_TENSOR.items())
def test_what_is_done_tensor_by_tensor_is_one_operation_for_each(
    case: str, most: int, counts: Counts
) -> None:
    few, many = (asked(counts, case, params)["operations"] for params in (FEW, MANY))
    if case in ON_MODULES:
        # A layer has two parameters; what it records is copied to wait for the next transfer.
        assert many - few <= (MANY - FEW) // 2 * (most + 1)
    else:
        assert many - few <= (MANY - FEW) * most


def test_a_second_dtype_costs_one_operation_per_measurement(counts: Counts) -> None:
    one, two = (asked(counts, OBSERVE, MANY, dtypes)["operations"] for dtypes in (ONE, TWO))
    assert two - one == 2  # after backward, and before the update


@pytest.mark.parametrize(
    ("case", "passes"), [(OBSERVE, 2), ("norm-log at accumulated", 1), (CLIP_BITES, 3)]
)
def test_gradients_are_read_as_often_as_somebody_measures_or_writes_them(
    case: str, passes: int, counts: Counts
) -> None:
    row = asked(counts, case, MANY)
    assert passes <= row["bytes_read"] / row["gradient_bytes"] < passes + 0.05


def test_a_clip_writes_the_gradients_once(counts: Counts) -> None:
    row = asked(counts, CLIP_BITES, MANY)
    assert 1 <= row["bytes_written"] / row["gradient_bytes"] < 1.05
    assert asked(counts, OBSERVE, MANY)["bytes_written"] / row["gradient_bytes"] < 0.05


def test_an_idle_rule_asks_for_nothing(counts: Counts) -> None:
    row = asked(counts, rule_sets.IDLE, MANY)
    assert {row[key] for key in ("operations", "bytes_read", "allocations", "host_reads")} == {0}


@pytest.mark.parametrize("case", [CLIP_IDLE, CLIP_BITES])
def test_observing_and_clipping_asks_for_8_operations_more_than_clipping(
    case: str, counts: Counts
) -> None:
    ours, torch_s = (asked(counts, name, MANY)["operations"] for name in (case, device_counts.CLIP))
    assert ours - torch_s <= 8


# -------------------------------------------------------------------------------------------------
# What a device adds: hooks that run in its thread, and reads by the host that cost a wait.
# -------------------------------------------------------------------------------------------------


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


def test_what_a_device_is_asked_to_do_is_counted(told: dict[str, Any]) -> None:
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


def test_norms_on_a_device_come_in_the_order_of_the_gradients(told: dict[str, Any]) -> None:
    for order, (wanted, together, alone) in case(told, "norms").items():
        assert together == pytest.approx(wanted, rel=1e-5), order
        assert alone == pytest.approx(wanted, rel=1e-5), order


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


def test_losses_are_combined_on_a_device_as_on_the_host(told: dict[str, Any]) -> None:
    found = case(told, "losses")
    host, device = found["host"], found["device"]
    assert device["weights"] == pytest.approx(host["weights"], rel=1e-4)
    assert device["cosine"] == pytest.approx(host["cosine"], rel=1e-4)
    for one, other in zip(device["grads"], host["grads"], strict=True):
        assert np.allclose(one, other, rtol=1e-4)


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


def test_a_device_is_asked_for_no_private_operation_that_cuda_refuses(told: dict[str, Any]) -> None:
    found, table = told["private_operations"], kernels.read()
    assert isinstance(found, list), found["error"]
    refused = [(name, dtype) for name, dtype in found if table[name][dtype] == kernels.REFUSES]
    assert refused == []
    assert {name for name, _ in found} == table.keys()
    assert {dtype for _, dtype in found} == {"float32", "bfloat16", "float16", "float64"}


# -------------------------------------------------------------------------------------------------
# What only CUDA does, as torch would tell of it: it captures a graph, or an assert of a kernel fails.
# -------------------------------------------------------------------------------------------------


def test_while_a_graph_is_captured_a_pack_asks_the_device_for_nothing(told: dict[str, Any]) -> None:
    found = case(told, "captured")
    *_, before, captured, after = found["reads"]
    assert (before, captured, after) == (1, 0, 1)
    said = "a CUDA graph is being captured: no rule acts during the capture, nor in its replays"
    assert [line.endswith(said) for line in found["lines"]].count(True) == 1


@pytest.mark.parametrize("where", ["failed", "failed_at_the_update"])
def test_a_device_that_fails_is_a_sentence_and_what_had_arrived_is_kept(
    where: str, told: dict[str, Any]
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
    assert any(line.startswith("  debug-nans   nan-trap  looked 70 times") for line in lines)
    assert found["ended"] == "stopped by AcceleratorError"


def test_a_session_that_a_device_ends_raises_no_second_error(told: dict[str, Any]) -> None:
    found = case(told, "failed_under_apply")
    assert found["context"] == "None"
    assert found["steps"] == 64
    (text,) = found["told"]
    assert text.endswith("; records up to step 63 are kept")
