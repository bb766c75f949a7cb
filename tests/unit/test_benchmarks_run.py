"""Every part of the benchmark suite runs, and counts what it should. No timing."""

from __future__ import annotations

import json

import pytest
import torch
from small import sgd

from benchmarks import (
    curves,
    device_counts,
    like_for_like,
    measure,
    overhead,
    ranks,
    rule_sets,
    scaling,
)
from benchmarks.cases import BARE, step_of
from benchmarks.machine import version
from benchmarks.workloads import Workload, deep_mlp
from gradsurgeon.actions import ACTIONS, LossRule

# Of benchmarks, which users need not run, `test_benchmarks` shows enough in the quick suite.
pytestmark = pytest.mark.slow

ONCE = measure.Budget(rounds=2, seconds=0.0, least=2)
SMALL = Workload("small", "four layers", lambda device: deep_mlp(device, 4), alone=True)


def test_every_action_is_measured_at_every_point() -> None:
    found = {(rule["action"], rule.get("at")) for _, rule in rule_sets.alone()}
    wanted = {
        (name, point)
        for name, action in ACTIONS.items()
        if not issubclass(action, LossRule)  # they need several losses: the group `losses`
        for point in (action.points if action.takes_at else (None,))
    }
    # Weights are recorded and edited after the update.
    of_weights = {(name, None) for name in ("norm-log", "clamp", "scale", "clip-norm")}
    assert found == wanted | of_weights
    names = [case.name for case in overhead.all_cases()]
    assert len(names) == len(set(names))


def test_a_step_can_be_measured_with_everything_on_it() -> None:
    cases = [case for case in overhead.all_cases() if case.package != "wandb"]
    rows = list(overhead.of_workload(SMALL, cases, "cpu", ONCE))
    assert [one["case"] for one in rows] == [case.name for case in cases]
    assert [one for one in rows if "skipped" in one] == []
    found = {one["case"]: one for one in rows}
    assert found[BARE.name]["allocations"] == found[BARE.name]["reads"] == 0
    assert found["register_hook closures with .item()"]["reads"] == 8
    # It keeps a copy per step, though not all of the three on top of the peak within a step.
    assert found["capture at step"]["peak_bytes"] > 2 * 4 * (16 * 16 + 16) * 4
    json.dumps(rows)


@pytest.mark.parametrize("job", like_for_like.JOBS, ids=lambda job: job.name)
def test_all_ways_of_a_job_do_the_same(job: like_for_like.Job) -> None:
    found = []
    ways = [rule_sets.case(job.name, job.rules).attach, *job.peers.values(), job.floor[1]]
    for attach, name in zip(ways, ["", *job.peers, ""], strict=True):
        if version(job.packages.get(name, "torch")) == "missing":
            continue
        task = SMALL.build("cpu")
        # Of one seed: the same gradients for all.
        task.optimizer = sgd(task.model, 1.0)
        before = [param.detach().clone() for param in task.params]
        step_of(task, attach(task))()
        after = task.params
        found.append([old - new.detach() for old, new in zip(before, after, strict=True)])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("axis", scaling.AXES, ids=lambda axis: axis.name)
def test_every_axis_can_be_measured(axis: scaling.Axis) -> None:
    found = scaling.at(axis, axis.quick[0], "cpu", budget=ONCE)
    assert found["clip_ratio"]["count"] == 2
    assert found["apply_s"] > 0
    assert found["bytes"] > 0


@pytest.mark.parametrize("curve", curves.CURVES, ids=lambda curve: curve.name)
def test_every_curve_can_be_measured(curve: curves.Curve) -> None:
    found = curves.measured(curve, min(curve.places[0], 100))
    assert found["seconds"] > 0
    assert ("bytes" in found) is ("steps" in curve.name)


def test_collectives_and_their_bytes_are_counted() -> None:
    found = {(one["wrapper"], one["params"], one["case"]): one for one in ranks.counted(1)}
    for layers in (4, 16):
        bare = found["ddp", 2 * layers, "bare step"]
        assert (bare["collectives"], bare["bytes"]) == (1, layers * (8 * 8 + 8) * 4)
        ours = found["ddp", 2 * layers, rule_sets.OBSERVE]
        assert (ours["collectives"], ours["bytes"]) == (0, 0)  # plain DDP needs none
    assert ("fsdp2", 8, rule_sets.CLIP_BITES) in found


def test_what_is_asked_of_a_device_is_counted_in_every_case() -> None:
    rows = list(device_counts.measured("cpu", quick=True))
    names = [case.name for case in device_counts.cases()]
    sizes = device_counts.SIZES[:2]
    assert [one["case"] for one in rows] == names * len(sizes)
    assert [one["params"] for one in rows] == [size for size, _ in sizes for _ in names]
    # The same again: the numbers are no measurements.
    again = device_counts.counted(sizes[:1], names[:4])
    assert again == [
        {key: one[key] for key in one if key not in ("group", "launches")} for one in rows[:4]
    ]
