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
# Seconds. A rank that waits for the store of the job waits for minutes.
LIMIT = 60.0


def launched(script: str, folder: Path) -> list[subprocess.CompletedProcess[bytes]]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    started = start_words(["-m", "gradsurgeon", "run", "train.py"], folder, 2)
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
