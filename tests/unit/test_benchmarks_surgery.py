"""What rules do in the group `surgery` is what is measured beside them. No timing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import measure, rule_sets, surgery
from benchmarks.cases import step_of
from benchmarks.like_for_like import Job, of_workload
from benchmarks.workloads import MLP, Workload, deep_mlp

pytestmark = pytest.mark.slow

ONCE = measure.Budget(rounds=2, seconds=0.0, least=2)
SMALL = surgery.with_momentum(Workload("small", "four layers", lambda device: deep_mlp(device, 4)))


@pytest.mark.parametrize("job", surgery.JOBS, ids=lambda job: job.name)
def test_all_ways_of_a_job_do_the_same(job: Job) -> None:
    found = []
    for attach in (rule_sets.case(job.name, job.rules).attach, *job.peers.values(), job.floor[1]):
        # Of one seed: the same gradients for all.
        task = SMALL.build("cpu")
        task.optimizer.param_groups[0]["lr"] = 1.0
        before = [param.detach().clone() for param in task.params]
        attached = attach(task)
        step = step_of(task, attached)
        step()
        step()
        attached.detach()
        after = task.params
        found.append([old - new.detach() for old, new in zip(before, after, strict=True)])
    # Each way draws its own noise.
    atol = 2e-5 if job.name == "noise" else 1e-7
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def test_every_job_is_measured() -> None:
    rows = list(
        of_workload(surgery.with_momentum(MLP), "cpu", ONCE, jobs=surgery.JOBS, group=surgery.GROUP)
    )
    assert [row["job"] for row in rows] == [job.name for job in surgery.JOBS]
    assert {row["group"] for row in rows} == {"surgery"}
