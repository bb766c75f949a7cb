"""Warnings of the package are lines of the launcher; filters and other warnings are the script's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import environment
from ranks import torchrun

pytestmark = pytest.mark.slow

# A parameter is replaced in the second step, of which the session warns.
TRAIN = """
import sys, warnings, torch
from torch import nn
from tqdm import tqdm
def train(model, wrap=lambda model: model):
    for step in tqdm(range(3), mininterval=0, bar_format="{n_fmt}/{total_fmt} |{bar:10}|"):
        if step == 1:
            model.weight = nn.Parameter(model.weight.detach().clone())
            warnings.warn("of the script", stacklevel=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        wrapped = wrap(model)
        wrapped(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
OURS = "weight was replaced by another parameter: its rules act on the new one"


@dataclass
class Launched:
    code: int
    out: str
    err: str


def run(folder: Path, script: str, *launch: str) -> Launched:
    rules = "version: 1\nrules:\n  - {id: norms, action: norm-log, params: '*'}\n"
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN + script, encoding="utf-8")
    own = ["-m", "gradsurgeon", "run", "--rules", "rules.yaml", *launch]
    done = subprocess.run(
        [sys.executable, *own, "train.py"],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        timeout=TIMEOUT,
    )
    # As it is: a carriage return is none of the ends of a line.
    return Launched(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.cover_children
def test_a_warning_is_one_line_beside_the_bar(tmp_path: Path) -> None:
    done = run(tmp_path, "train(nn.Linear(2, 1))\n")
    assert done.code == 0, done.err
    lines = [line.rpartition("\r")[2] for line in done.err.split("\n")]
    assert lines.count(f"gradsurgeon: {OURS}") == 1, done.err
    assert "GradSurgeonWarning" not in done.err
    assert "/gradsurgeon/" not in done.err.replace(str(tmp_path), "")
    # That of the script is as Python shows it: in the line of the bar, with the line of code.
    assert f"{tmp_path}/train.py:9: UserWarning: of the script\n  warnings.warn(" in done.err


FILTERS = {
    "ignored": ("warnings.simplefilter('ignore')\ntrain(nn.Linear(2, 1))\n", ""),
    "recorded": (
        "with warnings.catch_warnings(record=True) as found:\n    train(nn.Linear(2, 1))\n"
        "print(sorted({one.category.__name__ for one in found}))\n",
        "['GradSurgeonWarning', 'UserWarning']\n",
    ),
    "shown by the script": (
        "warnings.showwarning = lambda text, kind, *rest: print(kind.__name__)\n"
        "train(nn.Linear(2, 1))\n",
        "UserWarning\nGradSurgeonWarning\n",
    ),
    "an error": (
        "from gradsurgeon import GradSurgeonWarning\n"
        "warnings.simplefilter('error', GradSurgeonWarning)\n"
        "try:\n    train(nn.Linear(2, 1))\nexcept GradSurgeonWarning as error:\n    print(error)\n",
        f"{OURS}\n",
    ),
}


@pytest.mark.parametrize("how", FILTERS)
def test_filters_are_those_of_the_script(how: str, tmp_path: Path) -> None:
    script, out = FILTERS[how]
    done = run(tmp_path, script)
    assert (done.code, done.out) == (0, out), done.err
    assert f"gradsurgeon: {OURS}" not in done.err


RANKS = """
import os, time, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
train(nn.Linear(2, 1), %s)
dist.destroy_process_group()
# Threads of gloo that still let go of tensors would abort the process at its end.
time.sleep(0.3)
"""
WRAPPED = {
    "DistributedDataParallel": ["gradsurgeon: "],
    # Nobody knows whether they train the same.
    "lambda model: model": ["gradsurgeon: rank 1: ", "gradsurgeon: "],
}


@pytest.mark.parametrize("wrap", WRAPPED, ids=["copies", "each its own"])
def test_ranks_that_train_the_same_warn_once(wrap: str, tmp_path: Path) -> None:
    done = run(tmp_path, RANKS % wrap, "--", sys.executable, *torchrun())
    assert done.code == 0, done.err
    lines = [line.rpartition("\r")[2] for line in done.err.split("\n")]
    assert sorted(
        line for line in lines if line.startswith("gradsurgeon") and line.endswith(OURS)
    ) == [before + OURS for before in WRAPPED[wrap]]


LOGGED = """
import logging, sys
log = logging.getLogger("gradsurgeon")
log.info("of no weight")
for number in tqdm(range(2), mininterval=0, bar_format="{n_fmt}/{total_fmt}"):
    log.warning("trap: step %d, rule %s", number, "trap")
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
log.warning("skipped-step: step 2")
"""


@pytest.mark.cover_children
def test_what_is_logged_is_one_line_beside_the_bar_however_quiet(tmp_path: Path) -> None:
    script = LOGGED + "train(nn.Linear(2, 1))\n"
    done = run(tmp_path, script, "--quiet")
    assert done.code == 0, done.err
    lines = [line.rpartition("\r")[2] for line in done.err.split("\n")]
    assert [line for line in lines if line.startswith("gradsurgeon: ")] == [
        "gradsurgeon: trap: step 0, rule trap",
        "gradsurgeon: trap: step 1, rule trap",
        "gradsurgeon: skipped-step: step 2",
        f"gradsurgeon: {OURS}",
    ]
    assert "of no weight" not in done.err
    # Where the script logs to, it is as in any other library.
    assert done.out == "skipped-step: step 2\n"
