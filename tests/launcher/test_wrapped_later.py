"""Models that are wrapped or compiled after their optimizer was built, in scripts that nobody edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{early}
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().sum().backward()
    optimizer.step()
    {late}
print([param.tolist() for param in model.parameters()])
if dist.is_initialized():
    dist.destroy_process_group()
    # Threads of gloo that still let go of tensors would abort the process at its end.
    time.sleep(0.3)
"""
RULES = """\
  - {id: norms, action: norm-log, params: '*'}
  - {id: clip, action: clip-norm, params: '*', max_norm: 0.05, at: step, per: rule}
  - {id: half, action: scale, params: '0.*', factor: 0.5, at: backward}
"""
GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
WRAP = "model = DistributedDataParallel(model)"
COMPILE = "model = torch.compile(model, backend='eager')"
HOW = {
    "DDP": (f"{GROUP}; {WRAP}", ""),
    "DDP after a step": (GROUP, f"if step == 0: {WRAP}"),
    "compile": (COMPILE, ""),
    "compile in place": ("model.compile(backend='eager')", ""),
    "compile after a step": ("", f"if step == 0: {COMPILE}"),
}


# Where the wrapper is there before the optimizer, it comes first, and is exchanged.
WRAPPED_ANEW = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
for stage in range(2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().sum().backward()
        optimizer.step()
    model = DistributedDataParallel(model.module)
dist.destroy_process_group()
"""
# Only the root is sharded, so its parameters are whole when the first backward pass begins.
SHARDED_ROOT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def unwrapped(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = Folder(tmp_path_factory.mktemp("plain")).run(
        SCRIPT.format(early="", late=""), rules=RULES, record=False
    )
    assert done.code == 0, done.lines
    return done.out


@pytest.mark.parametrize("how", HOW)
def test_rules_go_on_as_if_nothing_were_wrapped(how: str, tmp_path: Path, unwrapped: str) -> None:
    early, late = HOW[how]
    folder = Folder(tmp_path)
    done = folder.run(SCRIPT.format(early=early, late=late), rules=RULES)
    assert done.code == 0, done.lines
    assert done.out == unwrapped
    (header,) = done.headers()
    assert header.endswith("on Sequential (4 parameters, 13 elements, updated by SGD)")
    assert folder.databases() == ["run/rank-0.db"]
    assert folder.steps("0.weight") == folder.steps("1.bias") == [0, 1, 2]
    assert "gradsurgeon: Sequential, 3 steps" in done.lines
    assert not [line for line in done.lines if "never" in line or "hook-" in line]


def test_a_model_that_is_wrapped_anew_is_the_same_model(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    done = folder.run(WRAPPED_ANEW, rules=RULES)
    assert done.code == 0, done.lines
    assert len(done.headers()) == 1
    assert "gradsurgeon: Sequential, 6 steps" in done.lines
    assert not [line for line in done.lines if "is gone" in line or "hook-" in line]
    assert folder.steps("0.weight") == [0, 1, 2, 3, 4, 5]


def test_the_header_names_the_optimizer_of_a_sharded_root(tmp_path: Path) -> None:
    done = Folder(tmp_path).run(SHARDED_ROOT)
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert header.endswith("(4 parameters, 13 elements, updated by AdamW)")
