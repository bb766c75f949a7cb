"""`gradsurgeon plan`: models of every kind, and none at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, environment, write_rules

pytestmark = pytest.mark.slow

NET = """
import time, torch
print("printed by the import")
def build():
    print("printed by the build")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    print("on", net[0].weight.device)
    return net
def reads_a_value():
    net = torch.nn.Linear(4, 3)
    float(net.weight.detach().sum())
    return net
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
class Zoo:
    Net = Net
ready = Net()
number = 3
def not_a_module():
    return 3
def fails():
    raise OSError("no data at <here>")
def ends():
    raise SystemExit("usage: net.py")
def sleeps():
    print("asleep", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


class TestPlan:
    def test_the_installed_command_finds_the_current_folder(self, here: Path) -> None:
        # A console script has its own folder, not the current one, on the path.
        code = 'import sys\nsys.path.remove("")\nfrom gradsurgeon.cli import main\nsys.exit(main())'
        done = call("plan", "clean.yaml", "--model", "net:Net", cwd=here, code=code)
        assert done.returncode == 0
        assert done.stdout.startswith("plan: clean.yaml on Net: 1 rule, 2 parameters, 6 elements\n")

    def test_without_torch_it_says_what_to_install(self, here: Path) -> None:
        code = WITHOUT_TORCH.replace(
            'AssertionError("torch was imported")',
            "ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
        )
        done = call("plan", "clean.yaml", "--model", "net:build", cwd=here, code=code)
        assert done.returncode == 2
        assert done.stderr.startswith(
            "gradsurgeon: `--model` needs PyTorch (pip install 'gradsurgeon[torch]'), which cannot be "
            "imported:\nTraceback"
        )
        assert done.stderr.endswith("\nModuleNotFoundError: No module named 'torch'\n")

    def test_an_interrupt_ends_it_quietly(self, here: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "gradsurgeon",
            "plan",
            "clean.yaml",
            "--model",
            "net:sleeps",
        ]
        with subprocess.Popen(
            command,
            cwd=here,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background inherits that interrupts are ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        ) as process:
            assert process.stderr is not None
            while process.stderr.readline() != "asleep\n":
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == ""
