"""What the options of `gradsurgeon run` do, each on a real script."""

from __future__ import annotations

import json
import re

import pytest
from outside import NORMS, Folder

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(5, 4)).square().mean() * (float("nan") if step == 3 else 1.0)
    loss.backward()
    optimizer.step()
print(sum(float(p.sum()) for p in model.parameters()))
"""
TRAP = "  - {id: trap, action: nan-trap, params: '*'}\n"
CLAMP = "  - {id: bound, action: clamp, params: '*', at: step, max: -1.0}\n"


@pytest.mark.cover_children
def test_a_dry_run_stops_at_the_first_step_and_writes_the_manifest(folder: Folder) -> None:
    done = folder.run(SCRIPT, "--dry-run")
    assert done.code == 0
    assert done.out.startswith("plan: ")
    assert "4 parameters: {0,2}.weight, {0,2}.bias" in done.out
    assert not (folder.path / "run").exists()
    manifest = json.loads((folder.path / "params.json").read_text(encoding="utf-8"))
    assert manifest["origin"] == "Sequential"
    assert [param["name"] for param in manifest["params"]][:2] == ["0.weight", "0.bias"]
    assert manifest["params"][0]["shape"] == [3, 4]


NO_STEP = """
import torch
from torch import nn
model = nn.Linear(2, 1)
{optimizer}
model(torch.ones(1, 2)).sum().backward()
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


@pytest.mark.cover_children
@pytest.mark.parametrize(
    ("script", "seen"),
    [
        (NO_STEP.format(optimizer=SGD), "no optimizer took a step, so there is no plan"),
        (NO_STEP.format(optimizer=""), "no torch optimizer was built on the parameters"),
        (
            NO_STEP.format(optimizer=SGD).replace("model(", "# "),
            "no optimizer took a step, so there is no plan",
        ),
        ("import torch", "no torch optimizer was built on the parameters of a module"),
        ("import sys", "no rule acted: the script did not import torch, so there is no plan"),
    ],
    ids=["no step", "no optimizer", "no gradient", "nothing", "no torch"],
)
def test_a_dry_run_that_sees_no_step_says_so(folder: Folder, script: str, seen: str) -> None:
    done = folder.run(script, "--dry-run", record=False)
    assert (done.code, done.out) == (0, "")
    (line,) = done.err.splitlines()
    assert line.startswith("gradsurgeon: ")
    assert seen in line
    assert not (folder.path / "params.json").exists()


def test_observing_edits_nothing_and_says_what_it_would(folder: Folder) -> None:
    plain = folder.run(SCRIPT, record=False)
    edited = folder.run(SCRIPT, rules=CLAMP, record=False)
    observed = folder.run(SCRIPT, "--observe", rules=CLAMP, record=False)
    assert observed.out == plain.out
    assert edited.out != plain.out
    assert "observing only: nothing is edited" in observed.err
    changed = re.search(r"bound  clamp  fired 12  changed (\d+)%", observed.err)
    assert changed is not None
    assert int(changed[1]) > 50


@pytest.mark.cover_children
def test_the_debugger_opens_in_the_line_of_the_script(folder: Folder) -> None:
    asked = "p step, type(optimizer).__name__\nq\n"
    script = SCRIPT.replace("range(3)", "range(6)")
    done = folder.run(script, "--pdb", rules=TRAP, record=False, stdin=asked)
    assert done.code == 1
    assert "(Pdb) (3, 'SGD')" in done.out
    assert "-> optimizer.step()" in done.out
    assert "NonFiniteGradientError: step 3, rule trap: 4 of 4 gradients" in done.err
    assert "the debugger is in the line that took the step" in done.err


@pytest.mark.cover_children
def test_the_debugger_does_not_open_on_several_ranks(folder: Folder) -> None:
    script = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().mul(float("nan") if (rank, step) == (1, 2) else 1.0).backward()
    optimizer.step()
"""
    done = folder.run(script, "--pdb", rules=TRAP, record=False, ranks=2)
    assert done.code == 1
    assert "Pdb" not in done.out
    assert "--pdb is for one process: run `gradsurgeon replay BUNDLE --pdb`" in done.err


@pytest.mark.cover_children
def test_a_rule_file_with_mistakes_stops_before_training(folder: Folder) -> None:
    done = folder.run(SCRIPT, rules=NORMS.replace("norm-log", "norm-lag"), record=False)
    assert done.code == 2
    assert done.out == ""
    assert "rules.yaml:3:25: error: unknown action `norm-lag`" in done.err
    assert "did you mean `norm-log`?" in done.err


@pytest.mark.cover_children
def test_records_that_cannot_be_written_stop_before_training(folder: Folder) -> None:
    (folder.path / "file").write_text("", encoding="utf-8")
    done = folder.run(SCRIPT, "--record", "file", record=False)
    assert done.code == 1
    assert "RecordError" in done.err


@pytest.mark.cover_children
def test_where_the_launcher_fails_the_script_runs_on(folder: Folder) -> None:
    # Something in the way of what the launcher imports.
    (folder.path / "pydantic.py").write_text("raise RuntimeError('not this one')\n")
    folder.write(SCRIPT)
    command = ("-m", "gradsurgeon", "run", "--rules", "rules.yaml", "train.py")
    done = folder.start(*command)
    said = "gradsurgeon: the script runs on without rules: not this one"
    assert [line for line in done.stderr.splitlines() if "gradsurgeon" in line] == [said]
    assert (done.returncode, bool(done.stdout)) == (0, True)


def test_rules_of_the_script_act_before_those_from_outside(folder: Folder) -> None:
    script = """
import torch, gradsurgeon
from torch import nn
model = nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
own = {"id": "own", "action": "scale", "params": "*", "factor": 3.0, "at": "step"}
session = gradsurgeon.apply(model, {"version": 1, "rules": [own]})
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(model.weight.grad.flatten().tolist())
gradsurgeon.remove(model)
print(session.status()["own"].fired)
"""
    bound = "  - {id: outside, action: clamp, params: '*', at: step, max: 2.0}\n"
    done = folder.run(script, rules=bound, record=False)
    assert done.code == 0, done.err
    # First times 3, then at most 2: the other way round it would be 3.
    assert done.out.splitlines() == ["[2.0, 2.0]"] * 3 + ["3"]
    assert "outside  clamp  fired 3" in done.err


def test_accelerate_starts_the_launcher_as_one_process(folder: Folder) -> None:
    folder.write(SCRIPT)
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m")
    command = ("gradsurgeon", "run", "--rules", "rules.yaml", "train.py")
    done = folder.fork(*launch, *command, env={"HF_HOME": str(folder.path)})
    assert done.code == 0, done.err
    assert done.out == folder.run(SCRIPT, record=False).out
    assert "gradsurgeon: Sequential, 3 steps" in done.lines


def test_the_collector_of_the_script_is_left_as_it_was(folder: Folder) -> None:
    script = """
import gc, torch
print(gc.isenabled())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(gc.isenabled())
gc.disable()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(gc.isenabled())
"""
    assert folder.run(script, record=False).out.split() == ["True", "True", "False"]
