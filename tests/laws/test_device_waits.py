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


def test_norms_on_a_device_come_in_the_order_of_the_gradients(told: Json) -> None:
    for order, (wanted, together, alone) in case(told, "norms").items():
        assert together == pytest.approx(wanted, rel=1e-5), order
        assert alone == pytest.approx(wanted, rel=1e-5), order


def test_elements_that_are_not_finite_are_counted_exactly_and_marked_by_one_reduction(
    told: Json,
) -> None:
    for dtype, wanted, counted, mark, operations, *_ in case(told, "nonfinite"):
        assert counted == wanted, dtype
        assert bool(mark) == bool(wanted), dtype
        assert operations <= (1 if dtype != "torch.float64" else 3), dtype


def test_no_copy_that_counts_elements_is_larger_than_a_part(told: Json) -> None:
    for dtype, *_, elements, names in case(told, "nonfinite"):
        assert not names.keys() - {"sub", "linalg_vector_norm", "add"}, dtype
        # A part has at most four elements here, and integers are finite.
        assert 4 * names.get("sub", 0) >= elements or dtype == "torch.int64"


def test_a_trap_on_modules_names_outputs_of_a_device_that_nobody_has_counted(told: Json) -> None:
    (kind, name, message), *_ = case(told, "trapped_outputs")
    assert (kind, name) == ("trap", "0")
    assert "the output of 0  uncounted elements" in message


def test_projections_of_a_device_are_those_of_the_host_in_three_operations(told: Json) -> None:
    for name, counted in case(told, "projections").items():
        assert counted["off"] < 1e-5, name
        if name.startswith("widening"):
            assert counted["operations"] <= 3, name
            assert counted["copied"] < 0.02, name
            # Of small tensors the signs are longer than they are.
            assert counted["read"] < 1.02 or not name.endswith("1000003"), name


def test_projections_of_many_small_tensors_take_no_more_operations_than_of_few(told: Json) -> None:
    found = case(told, "projections_of_many")
    few, many = found["operations"]
    assert few == many
    assert found["off"] < 1e-3


def test_all_rules_do_on_a_device_what_they_do_on_the_host(told: Json) -> None:
    found = case(told, "same_as_on_the_host")
    host, device = found["host"], found["device"]
    assert device["weights"] == host["weights"]
    # A replay does not see what operations of this device write, so no line of the loss is awaited.
    *events, line = host["events"]
    assert device["events"] == events
    assert line == ["notice", 3, ""]
    kinds = [(kind, step) for kind, step, _ in events]
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


def test_norms_clips_and_fingerprints_wait_in_none_of_40_steps(told: Json) -> None:
    assert case(told, "reads_in_40_steps") == {"norms and clip": 0, "fingerprint": 0}


def test_where_the_device_decides_the_host_waits_in_no_step(told: Json) -> None:
    for found in case(told, "decisions").values():
        assert found["rules"]["waits"] == 0
        assert not found["moved"]
        assert found["told"] == [
            ["trap", 8, 9],
            ["skipped-step", 8, 9],
            ["spike", 8, 9],
            ["skipped-step", 8, 9],
        ]


def test_traps_that_wait_read_the_flag_of_a_scaler_together_with_their_numbers(told: Json) -> None:
    found = case(told, "waiting_under_a_scaler")
    host, device = found["host"], found["device"]
    waits = device.pop("waits")
    # After the first update, of which optimizer and checks are asked, and beside those that overflow.
    assert [waits[step] for step in (1, 3, 4, 6)] == [1] * 4
    del host["waits"]
    assert device == host
    assert [kind for kind, _, _ in host["events"]] == ["scaler-skip", "scaler-skip"]


def test_what_a_decision_of_the_device_takes_does_not_grow_with_the_parameters(told: Json) -> None:
    found = case(told, "decisions")
    added = {}
    for size in ("few", "many"):
        added[size] = found[size]["rules"]["operations"] - found[size]["bare"]["operations"]
    assert added["many"] == added["few"]


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
    summary = lines[lines.index("gradsurgeon: Sequential, 70 steps") :]
    (trap,) = [line for line in summary if line.startswith("  debug-nans ")]
    assert "checked 70 updates" in trap
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
