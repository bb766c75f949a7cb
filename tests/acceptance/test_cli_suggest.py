"""`gradsurgeon suggest`: the command, what the guide shows of it, and whether its thresholds hold."""

from __future__ import annotations

import json
import pathlib
import random
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import pytest
import torch
import yaml
from commands import LINTED, ROOT, WITHOUT_TORCH, call, call_here
from pairs import slow
from runs import write
from torch import nn

import gradsurgeon

GUIDE = (ROOT / "rules" / "guide" / "thresholds.md").read_text(encoding="utf-8")
SUGGEST = ("suggest", "run", "--bites", "0.02")


def norms(seed: int, level: float = 1.0, steps: int = 1000) -> list[float]:
    rng = random.Random(seed)
    return [level * rng.lognormvariate(0, 0.2) for _ in range(steps)]


@pytest.fixture
def here(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder with a run of a model with two layers."""
    histories = {"fc1.weight": norms(0), "fc2.weight": norms(1), "fc1.bias": norms(2, 0.01)}
    write(tmp_path / "run", histories, point="step").close()
    return tmp_path


@pytest.mark.slow
@pytest.mark.cover_children
def test_it_needs_no_torch_and_lint_finds_nothing(here: pathlib.Path) -> None:
    done = call(*SUGGEST, "-o", "clips.yaml", cwd=here, code=WITHOUT_TORCH)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "gradsurgeon: clips.yaml: 2 rules for 3 parameters\n"
    linted = call("lint", "clips.yaml", cwd=here)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", LINTED)


def test_standard_output_is_the_file(here: pathlib.Path) -> None:
    done = call_here(*SUGGEST, cwd=here)
    assert (done.returncode, done.stderr) == (
        0,
        "gradsurgeon: standard output: 2 rules for 3 parameters\n",
    )
    call_here(*SUGGEST, "-o", "clips.yaml", cwd=here)
    assert done.stdout == (here / "clips.yaml").read_text(encoding="utf-8")
    assert [rule["id"] for rule in yaml.safe_load(done.stdout)["rules"]] == [
        "clip-fc-weight",
        "clip-fc1-bias",
    ]


def test_what_is_not_stationary_makes_the_exit_code_1(here: pathlib.Path) -> None:
    falling = [norm * (2 - step / 1000) for step, norm in enumerate(norms(0))]
    write(here / "falling", {"w": falling}, point="step").close()
    done = call_here("suggest", "falling", "--bites", "2%", cwd=here)
    assert done.returncode == 1
    assert "gradsurgeon: spikes-all: not stationary: the 98% quantile " in done.stderr


@pytest.mark.parametrize("mode", ["act", *slow("observe")])
@pytest.mark.parametrize(
    ("edit", "measured", "told"),
    [
        ({"action": "scale", "factor": 0.1, "at": "step"}, "step", "with `norms` above them"),
        ({"action": "spike-trap", "above": {"sigmas": 1.0}}, "step", "with `norms` above them"),
        ({"action": "scale", "factor": 0.1, "at": "step"}, "accumulated", ""),
        ({"action": "scale", "factor": 0.1, "at": "backward"}, "step", "with `--observe`"),
        ({"action": "scale", "factor": 0.1, "at": "backward"}, "accumulated", "with `--observe`"),
    ],
)
def test_what_is_said_of_norms_after_an_edit_is_what_was_recorded(
    tmp_path: pathlib.Path,
    mode: Literal["act", "observe"],
    edit: dict[str, object],
    measured: str,
    told: str,
) -> None:
    def record(path: pathlib.Path, *edits: dict[str, object]) -> list[float]:
        param = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.0)
        norm_log = {"id": "norms", "action": "norm-log", "params": "*", "at": measured}
        rules = {"version": 1, "rules": [*edits, norm_log]}
        model = nn.ParameterList([param])
        with gradsurgeon.apply(model, rules, record=path, mode=mode) as session:
            for norm in norms(0, steps=150):
                optimizer.zero_grad()
                (param * norm).sum().backward()
                optimizer.step()
            return [norm for _, norm in session.history("0", stat="l2", rule="norms")]

    same = record(tmp_path / "plain") == record(
        tmp_path / "run", {"id": "first", "params": "*", **edit}
    )
    done = call_here(*SUGGEST, cwd=tmp_path)
    assert same is ("edited before it was measured" not in done.stderr)
    assert same is (not told or (mode == "observe" and edit.get("at") == "backward"))
    assert same or told in done.stderr


def test_only_a_suggestion_is_written_over(here: pathlib.Path) -> None:
    file = here / "rules.yaml"
    file.write_text("")
    assert call_here(*SUGGEST, "-o", "rules.yaml", cwd=here).returncode == 0
    assert call_here(*SUGGEST, "-o", "rules.yaml", cwd=here).returncode == 0
    edited = file.read_text(encoding="utf-8").partition("\n")[2]
    file.write_text(edited, encoding="utf-8")
    done = call_here(*SUGGEST, "-o", "rules.yaml", cwd=here)
    assert done.returncode == 2
    assert "rules.yaml: is there already and is no suggestion" in done.stderr
    assert file.read_text(encoding="utf-8") == edited


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nowhere",), "nowhere: cannot be opened as a run"),
        (("run", "--bites", "0"), "'0' is no share of the steps: a number above 0 and below 1"),
        (("run", "--bites", "1"), "'1' is no share"),
        (("run", "--bites", "nan"), "'nan' is no share"),
        (
            ("run", "--bites", "1e-4"),
            "1,000 steps are too few for a share of 0.01%: it takes 10,000",
        ),
        (("run", "-o", "no/folder"), "cannot write no/folder: No such file"),
        (
            ("mangled",),
            "mangled/run.json: is damaged, or was not written by this version of gradsurgeon: no JSON",
        ),
        (("mangled",), "with format 2; restore it, or record the run again"),
        (("several",), "once rank 0 has begun; runs inside: several/Net"),
    ],
)
def test_what_it_cannot_do(here: pathlib.Path, arguments: tuple[str, ...], problem: str) -> None:
    write(here / "mangled", {"w": norms(0)}, point="step").close()
    (here / "mangled" / "run.json").write_text("[]", encoding="utf-8")
    write(here / "several" / "Net", {"w": norms(0)}, point="step").close()
    done = call_here("suggest", *arguments, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


def test_plan_and_diff_take_it_from_there(here: pathlib.Path) -> None:
    params = {"version": 1, "origin": "Net", "modules": []}
    names = ("fc1.weight", "fc2.weight", "fc1.bias")
    shape = {"aliases": [], "shape": [2, 2], "dtype": "float32", "requires_grad": True}
    entries = [{"name": name, **shape, "module_type": ["Linear"]} for name in names]
    (here / "params.json").write_text(
        json.dumps({**params, "hash": f"sha256:{'0' * 64}", "params": entries})
    )
    call_here(*SUGGEST, "-o", "clips.yaml", cwd=here)
    rules = 'version: 1\nrules:\n  - {id: trap, action: nan-trap, params: "*"}\n'
    (here / "old.yaml").write_text(rules)
    (here / "new.yaml").write_text(rules.replace("\n", "\ninclude: [clips.yaml]\n", 1))
    planned = call_here(
        "plan", "clips.yaml", "--params", "params.json", "--format", "json", cwd=here
    )
    bound = {rule["id"]: rule["params"] for rule in json.loads(planned.stdout)["rules"]}
    assert bound == {"clip-fc-weight": ["fc1.weight", "fc2.weight"], "clip-fc1-bias": ["fc1.bias"]}
    changed = call_here("diff", "old.yaml", "new.yaml", "--params", "params.json", cwd=here)
    assert changed.returncode == 0
    assert "2 added" in changed.stdout


def part() -> tuple[str, ...]:
    """Return the script of the guide, the command, and what it shows of its output."""
    return tuple(re.findall(r"^```\w*\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_the_guide_shows_what_it_prints(tmp_path: pathlib.Path) -> None:
    script, command, output, *_ = part()
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    trained = call(cwd=tmp_path, code=script)
    assert trained.returncode == 0, trained.stderr
    (arguments,) = re.findall(r"^gradsurgeon (suggest .*?) *(?:#.*)?$", command, re.MULTILINE)
    done = call_here(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 1
    # Another machine rounds other last digits.
    shown, found = (
        re.sub(r"[\d.,]*\d", "N", text) for text in (output, (tmp_path / "clips.yaml").read_text())
    )
    assert shown == found


def training(noise: float) -> Iterator[nn.Module]:
    """Train a small network; yield it before the first step, and after each."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    while True:
        yield model
        x = torch.randn(16, 8)
        y = x.sin().sum(1, keepdim=True) + noise * torch.randn(16, 1)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "before", "stationary"), [(1.0, 6000, True), (0.1, 0, False)], ids=["late", "early"]
)
def test_thresholds_bite_as_often_in_the_steps_that_follow(
    tmp_path: pathlib.Path, noise: float, before: int, *, stationary: bool
) -> None:
    share, steps, train = 0.02, 2000, training(noise)
    model = next(train)
    deque(islice(train, before), maxlen=0)
    norms = {"id": "norms", "action": "norm-log", "params": "*", "at": "step"}
    with gradsurgeon.apply(model, {"version": 1, "rules": [norms]}, record=tmp_path / "run"):
        deque(islice(train, steps), maxlen=0)
    call_here(*SUGGEST, "-o", "clips.yaml", cwd=tmp_path)
    text = (tmp_path / "clips.yaml").read_text(encoding="utf-8")
    rules = yaml.safe_load(text)["rules"]
    assert {rule["action"] for rule in rules} == {"clip-norm" if stationary else "spike-trap"}
    assert text.count("# not stationary: ") == (0 if stationary else len(rules))
    with gradsurgeon.apply(model, tmp_path / "clips.yaml") as session:
        deque(islice(train, steps), maxlen=0)
        bites = {rule: status.changed for rule, status in session.status().items()}
    assert all(share / 2 <= found <= 2 * share for found in bites.values()), bites
