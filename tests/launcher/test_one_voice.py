"""The launcher, the report as text and the report as JSON say the same of a run, and name the next command."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from outside import Folder, Launched
from ranks import Json

import gradsurgeon

pytestmark = pytest.mark.slow

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, ids):
        return self.head({body}).mean(1)
def main():
    net = Net()
    {before}
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for step in range(30):
        ids = torch.randint(0, 10, (16, 4))
        loss = nn.functional.cross_entropy(net(ids), (ids[:, 0] > 4).long())
        opt.zero_grad()
        (loss * {factor}).backward()
        opt.step()
if __name__ == "__main__":
    main()
"""
CHECKED = "  checked: debug-updates, debug-loop, debug-structure, debug-ranks; found: "


class Case(NamedTuple):
    """A training, and what is said of it: the beginning of the band, what was found, and its facts."""

    state: str
    found: str
    facts: tuple[str, ...] = ()
    body: str = "self.body(self.embed(ids))"
    before: str = "pass"
    factor: str = "1"


CASES = {
    "healthy": Case("fine: ended, clean", "nothing"),
    "no gradient yet": Case(
        "fine: ended",
        "no fault",
        ("never got a gradient: body.weight, body.bias",),
        body="self.body(self.embed(ids)).detach() + self.embed(ids)",
    ),
    "a reentrant checkpoint": Case(
        "look: step 19, rule debug-updates: 2 of 4 trained parameters, body.weight, body.bias, never got",
        "1 fault",
        ("never got a gradient: body.weight, body.bias",),
        body="torch.utils.checkpoint.checkpoint(self.body, self.embed(ids), use_reentrant=True)",
        before="net.embed.requires_grad_(False)",
    ),
    "a NaN": Case(
        "broken: step 20: ",
        "1 fault",
        ("non-finite: 5 parameters, first at step 20: ",),
        factor="(float('nan') if step > 19 else 1)",
    ),
}


def train(folder: Folder, case: Case, *options: str, record: bool = True) -> Launched:
    script = BEGIN.replace("{body}", case.body).replace("{before}", case.before)
    script = script.replace("{factor}", case.factor)
    done = folder.run(script, "--rules", "gradsurgeon:debug@1", *options, record=record)
    assert done.code == 0, done.lines
    return done


@pytest.mark.parametrize("name", CASES)
def test_every_view_says_the_same(name: str, folder: Folder) -> None:
    case = CASES[name]
    lines = train(folder, case).lines
    start = lines.index("gradsurgeon: Net, 30 steps")
    summary = [line.removeprefix("  ") for line in lines[start + 1 :]]
    text = folder.fork("-m", "gradsurgeon", "report", "run").out.splitlines()
    found: Json = json.loads(
        folder.fork("-m", "gradsurgeon", "report", "run", "--format", "json").out
    )
    band = found["band"]
    assert summary[0] == text[0] == f"{band['state']}: {band['sentence']}"
    assert summary[0].startswith(case.state)
    assert f"{CHECKED}{case.found}" in lines
    told = [remark for remark in found["remarks"] if "requires_grad off" not in remark]
    assert [remark.startswith(fact) for remark, fact in zip(told, case.facts, strict=True)] == [
        True for _ in case.facts
    ]
    for remark in told:
        assert f"    {remark}" in text
        assert f"  {remark}" in summary
    said = "\n".join(lines)
    alarming = [word for word in ("look", "broken", "fault", "never got") if word in said]
    assert bool(alarming) == (name != "healthy")
    with gradsurgeon.open_run(folder.path / "run") as run:
        assert repr(run).splitlines()[1] == summary[0]
    failed = folder.fork("-m", "gradsurgeon", "report", "run", "--fail-on", "check")
    assert failed.code == int("reentrant" in name)


def test_a_run_ends_with_the_next_command(folder: Folder) -> None:
    case = CASES["a NaN"]
    *lines, report, replay = train(folder, case).lines
    assert report == f"  next: gradsurgeon report {folder.path / 'run'}"
    assert replay.startswith(f"  next: gradsurgeon replay {folder.path / 'run'}/trap-step20-rank0 ")
    # The diagnosis shows the same command.
    assert f"  to run the step again: {replay.removeprefix('  next: ')}" in lines
    words = replay.split()[2:]
    assert words[-2:] == ["--model", "train:Net"]
    replayed = folder.fork("-m", "gradsurgeon", *words)
    assert replayed.code == 0, replayed.err
    last = train(folder, CASES["healthy"], record=False).lines[-1]
    assert last == "gradsurgeon: next: gradsurgeon run --record runs/1 train.py"
    assert folder.fork("-m", *last.split()[2:]).code == 0


PLAYERS = """
import torch
from torch import nn
def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)
class Trainer:
    def __init__(self):
        self.critic = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        self.optimizer = optimizer_of(self.critic)
def main():
    G, D = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    pairs = [(G, optimizer_of(G)), (D, torch.optim.SGD(D[0].parameters(), lr=0.1))]
    trainer, model = Trainer(), nn.Linear(2, 1)
    pairs += [(trainer.critic, trainer.optimizer), (model, optimizer_of(model))]
    pairs[2][1].param_groups[0]["params"].pop()
    for module, optimizer in pairs:
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
main()
"""


def test_models_have_the_names_of_their_variables(folder: Folder) -> None:
    done = folder.run(PLAYERS)
    assert done.code == 0, done.lines
    heads = [line for line in done.lines if " updated by SGD)" in line]
    names = [line.split(" on ")[1] for line in heads]
    assert names == [
        "G (2 parameters, 6 elements, updated by SGD)",
        "D (2 parameters, 3 elements, updated by SGD)",
        "critic (4 parameters, 5 elements, 3 of 4 updated by SGD)",
        # `model` says less than the class.
        "Linear (2 parameters, 3 elements, updated by SGD)",
    ]
    several = folder.fork("-m", "gradsurgeon", "report", "run", "run/D").out.splitlines()
    first, second = several.index("run:"), several.index("run/D:")
    assert " on G: " in several[first + 2]
    assert " on D: " in several[second + 2]
