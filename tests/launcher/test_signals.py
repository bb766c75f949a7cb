"""Signals reach the script, and nobody else, as they would without the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from outside import Folder

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

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


def test_an_interrupt_from_outside_is_that_of_plain_python(tmp_path: Path) -> None:
    Folder(tmp_path).write(TRAIN + "train()\nprint('ready', flush=True)\ntime.sleep(60)\n")
    command = ("-m", "gradsurgeon", "run", "--rules", "rules.yaml", "train.py")
    # A shell starts what it leaves in the background deaf to it, and so are all below that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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
