"""What rules may ask of a device per step, counted on one made of Python. No timing."""

from __future__ import annotations

import json
from pathlib import Path

import forks
import pytest
from bounds import TIMEOUT
from commands import ROOT, environment
from ranks import Json

from benchmarks import device_counts, rule_sets

pytestmark = pytest.mark.slow

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
ON_MODULES = [*rule_sets.on_modules(), rule_sets.FINGERPRINT]
# Whose work grows with the tensors, one after the other: at most so many operations for each.
PER_TENSOR = {
    "norm-log at backward": 1,
    # Input, output and its gradient of each layer.
    rule_sets.FINGERPRINT: 3,
    "norm-log on every module's output": 1,
    "norm-log on every module's output.grad": 1,
    "norm-log on every module's input.grad": 1,
    "nan-trap on every module's output": 1,
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

Counts = dict[tuple[str, int, str], Json]


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


def asked(counts: Counts, case: str, params: int, dtypes: tuple[str, ...] = ONE) -> Json:
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
        # A layer has two parameters.
        assert many - few <= (MANY - FEW) // 2 * most
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
def test_observing_and_clipping_asks_for_9_operations_more_than_clipping(
    case: str, counts: Counts
) -> None:
    ours, torch_s = (asked(counts, name, MANY)["operations"] for name in (case, device_counts.CLIP))
    # One of them is the copy of the loss.
    assert ours - torch_s <= 9
