"""How a run ended, and what stands out of it: written by real trainings, and said alike by every view."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Json
from runs import another_process
from small import rule_file, sgd
from torch import nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError
from gradsurgeon.report import from_run
from gradsurgeon.report.json_form import to_dict

NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
TRAP = {"id": "no-nan", "action": "nan-trap", "params": "*", "forensics": False}
RULES = rule_file(NORMS)
NO_END = r"broken: no end was written, last record at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: what came after it is missing"


def train(path: Path, *rules: Json, broken: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    given = {"version": 1, "rules": list(rules)}
    with gradsurgeon.apply(model, given, optimizer=optimizer, record=path):
        for step in range(6):
            optimizer.zero_grad()
            scale = torch.nan if step == broken else 1.0
            (scale * model(torch.ones(2, 3))).sum().backward()
            optimizer.step()


def head(path: Path) -> list[str]:
    with gradsurgeon.open_run(path) as run:
        return from_run(run).head


def ended(path: Path) -> Json:
    with gradsurgeon.open_run(path) as run:
        found: Json = to_dict(from_run(run))["ended"]
    return found


def test_a_clean_end(tmp_path: Path) -> None:
    train(tmp_path, NORMS, TRAP)
    assert head(tmp_path)[0] == "fine: ended, clean"
    assert ended(tmp_path) == {"state": "ended", "words": "ended", "ranks": {"0": "ended"}}


def test_a_trap(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError):
        train(tmp_path, NORMS, TRAP, broken=4)
    first, diagnosis = head(tmp_path)[:2]
    assert first == "broken: stopped at step 4 by rule no-nan (NonFiniteGradientError)"
    assert diagnosis.startswith("  step 4")
    assert ended(tmp_path)["state"] == "stopped"


def test_skipped_steps(tmp_path: Path) -> None:
    # A caught exception before it makes no difference.
    with contextlib.suppress(NonFiniteGradientError):
        train(tmp_path / "first", TRAP, broken=2)
    train(tmp_path / "run", NORMS, {**TRAP, "then": "skip-step"}, broken=4)
    first, words = head(tmp_path / "run")[:2]
    assert first.startswith("look: step 4")
    assert words == "ended, 1 step skipped"
    assert ended(tmp_path / "run")["state"] == "ended"


def test_an_exception_of_the_script(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ZeroDivisionError), gradsurgeon.apply(model, RULES, record=tmp_path):
        model(torch.ones(2, 3)).sum().backward()
        _ = 1 / 0
    assert head(tmp_path)[0] == "broken: stopped by ZeroDivisionError"


def test_an_exception_in_a_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def fail(*_: object) -> None:
        raise MemoryError

    optimizer.register_step_post_hook(fail)
    with (
        pytest.raises(MemoryError),
        gradsurgeon.apply(model, RULES, optimizer=optimizer, record=tmp_path),
    ):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert head(tmp_path)[0] == "broken: stopped by MemoryError"


def test_a_training_after_a_caught_exception_has_ended(tmp_path: Path) -> None:
    try:
        int("no number")
    except ValueError:
        train(tmp_path / "run", NORMS)
    assert head(tmp_path / "run")[0] == "fine: ended, clean"
    with pytest.raises(ValueError, match="own"):
        _raise_after_training(tmp_path / "own")
    assert head(tmp_path / "own")[0] == "broken: stopped by ValueError"


def _raise_after_training(path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    try:
        int("no number")
    except ValueError:
        with gradsurgeon.apply(model, RULES, optimizer=optimizer, record=path):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            raise ValueError("its own") from None


ENDS = """
import sys, torch, gradsurgeon
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
session = gradsurgeon.apply(model, rules, optimizer=optimizer, record=sys.argv[1])
for step in range(3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "fine: ended, clean"),
        ("sys.exit(0)", "fine: ended, clean"),
        ("raise KeyError('x')", "broken: stopped by KeyError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", NO_END),
    ],
)
def test_the_end_of_a_process(tmp_path: Path, end: str, said: str) -> None:
    code = f"{ENDS}\n{end}\n"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], check=False, capture_output=True
    )
    assert re.fullmatch(said, head(tmp_path / "run")[0])
    state = {"e": "ended", "s": "stopped", "n": "unknown"}[said.partition(": ")[2][0]]
    assert ended(tmp_path / "run")["state"] == state


WRITES = """
import sys
from runs import add, KEY, meta, values
from gradsurgeon.records.store.writer import RunWriter
writer = RunWriter(sys.argv[1], meta=meta())
add(writer, KEY, 0, values(1.0, 1.0))
writer.commit()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_run_of_another_process_runs_until_that_is_killed(tmp_path: Path) -> None:
    with another_process(WRITES, str(tmp_path)):
        assert head(tmp_path)[0] == "fine: running"
    assert re.fullmatch(NO_END, head(tmp_path)[0])
    assert ended(tmp_path)["state"] == "unknown"


@contextlib.contextmanager
def gan(path: Path) -> Iterator[gradsurgeon.Session]:
    """Train the two models of a GAN; the last pass of the generator leaves gradients in the other one."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
    optimizers = {name: sgd(model[name], 0.001) for name in ("d", "g")}
    with gradsurgeon.apply(
        model, RULES, optimizer=list(optimizers.values()), record=path
    ) as session:
        for _ in range(30):
            for name, scale in (("d", 1.0), ("g", 1000.0)):
                optimizers[name].zero_grad()
                noise = torch.ones(4, 2)
                (scale * model["d"](model["g"](noise))).sum().backward()
                optimizers[name].step()
        yield session


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_what_waits_for_an_update_that_never_came_is_no_last_value(tmp_path: Path) -> None:
    with gan(tmp_path) as session:
        while_it_runs = gradsurgeon.report.summary(session)
        assert while_it_runs.steps == (0, 29)
        assert not [track for track in while_it_runs.history.tracks if track.spike]
    with gradsurgeon.open_run(tmp_path) as run:
        pending = {name: step for name, step in run.pending.items() if name.startswith("d.")}
        assert set(pending.values()) == {30}
        assert max(step for step, _ in run.history("d.weight")) == 30  # the record itself is there
        report = from_run(run)
    assert report.steps == (0, 29)
    for one in (report, while_it_runs):
        (track,) = [track for track in one.history.tracks if track.name == "d.weight"]
        assert int(track.steps[-1]) == 29
        assert track.spike is None
        assert not [remark for remark in one.remarks if "spike" in remark or "level" in remark]
