"""`gradsurgeon run --resume RUN`: a script that is stopped and started again ends as one that was not."""

from __future__ import annotations

import pytest
import torch
from outside import Folder

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]

SCRIPT = """
import os, sys, torch
from torch import nn
first, last, saved = int(os.environ["FIRST"]), int(os.environ["LAST"]), os.environ["SAVED"]

def train(model, name):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        state = torch.load("checkpoint." + name)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, last):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :1]).square().mean() * (30 if step % 11 == 10 else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved + "." + name)

torch.manual_seed(0)
train(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), "mlp")
train(nn.Linear(8, 1), "linear")
"""
SPIKES = """\
  - {id: spikes, action: spike-trap, params: "*", above: {sigmas: 2.5, beta: 0.9, warmup: 10}}
  - {id: half, action: scale, params: "*", at: step, factor: 0.5, steps: {every: 7}}
"""


def part(first: int, last: int, saved: str) -> dict[str, str]:
    return {"FIRST": str(first), "LAST": str(last), "SAVED": saved}


def test_both_models_go_on_bit_for_bit(folder: Folder) -> None:
    def run(first: int, last: int, saved: str, *options: str) -> list[str]:
        env = part(first, last, saved)
        done = folder.run(SCRIPT, *options, rules=SPIKES, record=False, env=env)
        assert done.code == 0, done.lines
        return done.lines

    run(0, 60, "whole")
    run(0, 37, "checkpoint", "--record", "one")
    lines = run(37, 60, "resumed", "--record", "two", "--resume", "one")
    assert sum("from step 37" in line for line in lines) == 4  # two headers, two summaries
    for name in ("mlp", "linear"):
        whole, resumed = (torch.load(folder.path / f"{of}.{name}") for of in ("whole", "resumed"))
        for key, value in whole["model"].items():
            assert torch.equal(value, resumed["model"][key]), key
    # Without the state the statistic begins anew, and the schedule is another one.
    run(37, 60, "anew")
    whole, anew = (torch.load(folder.path / f"{of}.mlp") for of in ("whole", "anew"))
    assert any(not torch.equal(value, anew["model"][key]) for key, value in whole["model"].items())


def test_a_step_that_is_given_goes_before_that_of_the_run(folder: Folder) -> None:
    folder.run(SCRIPT, rules=SPIKES, env=part(0, 30, "checkpoint"))
    done = folder.run(
        SCRIPT,
        "--resume",
        "run",
        "--start-step",
        "20",
        rules=SPIKES,
        record=False,
        env=part(20, 25, "x"),
    )
    assert sum("from step 20" in line for line in done.lines) == 4


def test_other_rules_are_told_apart_by_name(folder: Folder) -> None:
    folder.run(SCRIPT, rules=SPIKES, env=part(0, 30, "checkpoint"))
    others = SPIKES.replace("sigmas: 2.5", "times: 1.5").replace("id: half", "id: scaled")
    done = folder.run(SCRIPT, "--resume", "run", rules=others, record=False, env=part(30, 33, "x"))
    assert done.code == 0
    told = "has learnt as `sigmas`, per: rule, and is `times`, per: rule: the rule restarts"
    assert any(f"rule spikes: {told}" in line for line in done.lines)


@pytest.mark.parametrize("name", ["other", "run"])
def test_what_cannot_be_resumed_is_refused_at_once(folder: Folder, name: str) -> None:
    folder.run(SCRIPT, rules=SPIKES, env=part(0, 3, "checkpoint"))
    for file in folder.path.glob("run/state-*.pt"):
        file.unlink()
    done = folder.run(SCRIPT, "--resume", name, rules=SPIKES, record=False, env=part(3, 4, "x"))
    assert done.code == 2
    told = f"gradsurgeon run: --resume: {name} holds no state to resume from: "
    assert done.lines[0].startswith(told)
    assert not (folder.path / "x.mlp").exists()


def test_a_damaged_state_stops_nothing(folder: Folder) -> None:
    folder.run(SCRIPT, rules=SPIKES, env=part(0, 3, "checkpoint"))
    path = folder.path / "run" / "state-0.pt"
    path.write_bytes(b"junk")
    done = folder.run(SCRIPT, "--resume", "run", rules=SPIKES, record=False, env=part(3, 5, "x"))
    assert done.code == 0
    told = (
        "it is damaged, no whole file of `torch.save`; resume from another file, or remove this one"
    )
    assert f"gradsurgeon: {path}: {told}: then the rules restart what they learn" in done.lines
    anew = (
        "gradsurgeon: the rules start without what they had learnt, at step 0: pass --start-step N if the script "
        "continues a training"
    )
    assert anew in done.lines
    assert (folder.path / "x.mlp").exists()


def test_a_model_that_the_run_did_not_have_begins_anew(folder: Folder) -> None:
    folder.run(SCRIPT.replace("train(nn.Linear(8, 1)", "# "), rules=SPIKES, env=part(0, 3, "x"))
    done = folder.run(SCRIPT, "--resume", "run", rules=SPIKES, record=False, env=part(0, 3, "y"))
    assert done.code == 0
    said = "cannot be resumed: it has no state of this model, or of this rank"
    assert [line for line in done.lines if line.endswith(said)] == [
        f"gradsurgeon: {folder.path / 'run' / 'Linear'} {said}"
    ]


# Keeps its state before step 20, and no more, until it is killed.
KILLED = (
    SCRIPT.replace(
        "import os, sys, torch\n",
        "import os, signal, sys, torch\nfrom gradsurgeon.records import recorder\n",
    )
    .replace(
        "        x = torch.randn",
        "        recorder._STATE_SECONDS = 0 if step < 20 else 1e9\n        x = torch.randn",
    )
    .replace("    torch.save(", "    os.kill(os.getpid(), signal.SIGKILL)\n    torch.save(")
)


@pytest.mark.parametrize("given", ["", "25"])
def test_a_run_that_was_killed_goes_on_from_its_saved_state(folder: Folder, given: str) -> None:
    assert folder.run(KILLED, rules=SPIKES, env=part(0, 30, "x")).code == -9
    options = ("--resume", "run", *(("--start-step", given) if given else ()))
    first = SCRIPT.replace("train(nn.Linear(8, 1)", "# ")
    done = folder.run(first, *options, rules=SPIKES, record=False, env=part(0, 3, "y"))
    assert done.code == 0, done.lines
    said = f"gradsurgeon: the rules go on from {folder.path / 'run'}, saved before step 20"
    assert said in done.lines
    assert any(f"from step {given or '20'}" in line for line in done.lines)


def test_each_rank_has_its_own(folder: Folder) -> None:
    script = (
        SCRIPT.replace(
            "import os, sys, torch\n",
            "import os, sys, torch\ntorch.distributed.init_process_group('gloo')\n",
        )
        .replace(
            "optimizer = torch.optim",
            "model = nn.parallel.DistributedDataParallel(model)\n    optimizer = torch.optim",
        )
        .replace('"checkpoint." + name', '"checkpoint." + name, weights_only=True')
        + "\ntorch.distributed.destroy_process_group()\n"
    )
    for first, last, saved, options in (
        (0, 40, "whole", ()),
        (0, 25, "checkpoint", ("--record", "one")),
        (25, 40, "resumed", ("--resume", "one")),
    ):
        done = folder.run(
            script,
            *options,
            rules=SPIKES,
            record=False,
            ranks=2,
            env=part(first, last, saved),
        )
        assert done.code == 0, done.lines
    assert {file.name for file in (folder.path / "one").glob("state-*")} == {
        "state-0.pt",
        "state-1.pt",
    }
    whole, resumed = (torch.load(folder.path / f"{of}.mlp") for of in ("whole", "resumed"))
    for key, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][key]), key


RULES = """\
  - {id: hold, action: freeze, params: "0.*", steps: {from: 2, to: 5}}
  - {id: slow, action: scale, params: "*.weight", factor: 0.1}
"""


def test_a_checkpoint_that_the_rules_do_not_know_of_is_told(folder: Folder) -> None:
    def lines(first: int, *options: str) -> list[str]:
        env = part(first, first + 9, "x" if first else "checkpoint")
        return folder.run(SCRIPT, *options, rules=RULES, record=False, env=env).lines

    resumed = (
        "AdamW has made 9 updates already, and steps count from 0 here, so schedules and learned"
    )
    remedy = "pass --resume RUN, or --start-step 9 where the earlier run has no run directory"
    begun = lines(0, "--record", "one")
    (hold,) = [
        line for line in begun if line.startswith("  hold  freeze  at step      2 parameters")
    ]
    assert hold.endswith("  steps 2..4")
    unknown = lines(9)
    for told, number in ((begun, 0), (unknown, 1), (lines(9, "--resume", "one"), 0)):
        assert sum(resumed in line and remedy in line for line in told) == number, told
        # No rule binds in the second model.
        assert sum("a constant factor of 0.1 changes next to nothing" in line for line in told) == 1
    assert not any(resumed in line for line in lines(9, "--start-step", "9"))
    assert sum("changes next to nothing" in line for line in lines(0, "--dry-run")) == 1
