"""Scripts on two ranks that nobody edits, under the default rules: the ranks compare notes, and none waits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ranks import start_words

pytestmark = pytest.mark.slow

# Rank 1 leaves out the update before the last one.
SKIPS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import barrier, destroy_process_group

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for step in range({updates}):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        if dist.get_rank() == 0 or step != {updates} - 2:
            optimizer.step()
    barrier()
    destroy_process_group()

main()
"""
# Rank 0, which hosts the store of the job, ends before rank 1 makes its first update.
ENDS = """
import os, time, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
dist.init_process_group("gloo")
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if dist.get_rank() == 0:
    Path("pid").write_text(str(os.getpid()))
dist.barrier()
first = int(Path("pid").read_text())
while dist.get_rank():
    try:
        os.kill(first, 0)
    except ProcessLookupError:
        break
    time.sleep(0.01)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("trained")
"""
# The batch of one rank has a number whose root is NaN.
ROOT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 1)

    def forward(self, x):
        return self.first(x.sqrt())

dist.init_process_group("gloo")
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(4):
    x = torch.ones(8, 4)
    if step == 2 and dist.get_rank() == {rank}:
        x[3, 1] = -1
    optimizer.zero_grad()
    (model(x).square().mean(){more}).backward()
    optimizer.step()
dist.destroy_process_group()
"""
# The loss of one rank is NaN, and its gradients are finite.
NAN_LOSS = " + (float('nan') if step == 2 and dist.get_rank() == 1 else 0)"
AVERAGED = (
    "they were finite on this rank before ranks averaged them: look at the reports of other ranks"
)
# Rank 1 gets NaN in three steps, and the script takes its weights back each time.
HEALS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    x = torch.ones(8, 4)
    if step in (1, 3, 4) and dist.get_rank() == 1:
        x[3, 1] = float("nan")
    kept = [param.detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept):
            if not param.isfinite().all():
                param.copy_(value)
dist.destroy_process_group()
"""
# Seconds. A rank that waits for the store of the job waits for minutes.
LIMIT = 60.0


def launched(script: str, folder: Path, *options: str) -> list[subprocess.CompletedProcess[bytes]]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    started = start_words(["-m", "gradsurgeon", "run", *options, "train.py"], folder, 2)
    try:
        return [rank.wait(LIMIT) for rank in started]
    finally:
        for rank in started:
            rank.kill()


@pytest.mark.parametrize("updates", [12, 42])
def test_rows_are_compared_before_the_process_group_goes(updates: int, tmp_path: Path) -> None:
    first, second = launched(SKIPS.format(updates=updates), tmp_path)
    assert (first.returncode, second.returncode) == (0, 0)
    found = f"step {updates - 1}, rule debug-ranks: ranks 0, 1 differ in the weights weight, bias"
    assert found in first.stderr.decode()
    assert f"Rank 1 has made {updates - 2} updates" in first.stderr.decode()
    assert second.stderr == b""


def test_a_rank_goes_on_where_the_host_of_the_store_has_ended(tmp_path: Path) -> None:
    first, second = launched(ENDS, tmp_path)
    assert (first.returncode, first.stdout) == (0, b"trained\n")
    assert (second.returncode, second.stdout) == (0, b"trained\n"), second.stderr


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_healthy_rank_says_that_the_nan_came_from_another_rank(
    guilty: int, tmp_path: Path
) -> None:
    script = ROOT.format(rank=guilty, more="")
    done = launched(script, tmp_path, "--record", "run")
    texts = [rank.stderr.decode() for rank in done]
    born = "NaN born in the forward pass of the root (Net): aten.sqrt, reproduced\n"
    assert born in texts[guilty]
    healthy = texts[1 - guilty].partition("gradsurgeon: Net, 4 steps\n")[0]
    assert "the script changed them" not in healthy
    assert f"; {AVERAGED}\n" in healthy
    assert "\nif no other rank reports NaN or Inf, the average itself overflowed\n" in healthy
    assert born not in healthy
    summary = texts[0].partition("gradsurgeon: Net, 4 steps\n")[2]
    assert summary.startswith(
        "  broken: step 2: NaN born in the forward pass of the root (Net): aten.sqrt, "
    )
    bundle = tmp_path / "run" / f"trap-step2-rank{guilty}"
    assert f"\n  next: gradsurgeon replay {bundle} --model " in summary


def test_the_summary_has_what_another_rank_found(tmp_path: Path) -> None:
    script = ROOT.format(rank=2, more=NAN_LOSS)
    first, _ = launched(script, tmp_path, "--record", "run")
    text = first.stderr.decode().partition("gradsurgeon: Net, 4 steps\n")[2]
    born = "NaN born in the forward pass outside of the model: aten.add (AddBackward0)"
    assert text.startswith(f"  look: step 2: {born}\n")


@pytest.mark.parametrize("record", [True, False])
def test_later_trips_of_a_healthy_rank_say_where_to_look(record: bool, tmp_path: Path) -> None:
    options = ("--record", "run") if record else ()
    first, _ = launched(HEALS, tmp_path, *options)
    lines = first.stderr.decode().partition("gradsurgeon: Linear, 6 steps\n")[2].splitlines()
    bad = "rule debug-nans: 2 of 2 gradients are not finite after backward"
    trips = [line for line in lines if line.startswith("  trap: ")]
    if record:
        # The events of all ranks; those of the first rank have no name.
        assert trips == [
            f"  trap: step 1, {bad}; {AVERAGED} (x3, steps 1..4)",
            f"  trap: rank 1: step 1, {bad} (x3, steps 1..4)",
        ]
    else:
        # The band tells the first one.
        assert lines[0] == f"  look: step 1, {bad}; {AVERAGED}"
        assert trips == [f"  trap: step 3, {bad}; {AVERAGED} (x2, steps 3..4)"]
