"""Signals reach the script, and nobody else, as they would without the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import environment

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

RULES = "version: 1\nrules:\n  - {id: norms, action: norm-log, params: '*'}\n"
TRAIN = """
import os, signal, sys, time, torch
def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
SUMMARY = "gradsurgeon: Linear, 3 steps"


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN + script, encoding="utf-8")
    (folder / "rules.yaml").write_text(RULES, encoding="utf-8")
    own = ["-m", "gradsurgeon", "run", "--rules", "rules.yaml", "--record", "run"]
    return subprocess.Popen(
        [sys.executable, *own, "train.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HANDLED = {
    "before": "signal.signal(signal.SIGTERM, own)\ntrain()\n",
    "after": "train()\nsignal.signal(signal.SIGTERM, own)\n",
    # As Lightning does: the handler that was there before is called as well.
    "chained": """
train()
before = signal.getsignal(signal.SIGTERM)
def both(number, frame):
    if callable(before):
        before(number, frame)
    own(number, frame)
signal.signal(signal.SIGTERM, both)
""",
}


@pytest.mark.parametrize("how", HANDLED)
def test_a_script_that_handles_the_signal_is_left_to_it(how: str, tmp_path: Path) -> None:
    script = f"""
def own(number, frame):
    print("saving", flush=True)
    time.sleep({2 if how == "after" else 0})  # longer than the launcher waits for a last word
    sys.exit(5)
{HANDLED[how]}
os.kill(os.getpid(), signal.SIGTERM)
"""
    started = start(tmp_path, script)
    out, err = started.communicate(timeout=TIMEOUT)
    assert (started.returncode, out) == (5, "saving\n")
    assert SUMMARY in err.splitlines()


def test_an_interrupt_from_outside_is_that_of_plain_python(tmp_path: Path) -> None:
    # A shell starts what it leaves in the background deaf to it, and so are all below that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = start(tmp_path, "train()\nprint('ready', flush=True)\ntime.sleep(60)\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=TIMEOUT)
    assert started.returncode == -signal.SIGINT
    lines = err.splitlines()
    assert "KeyboardInterrupt" in lines
    assert SUMMARY in lines
    assert "/gradsurgeon/" not in err
