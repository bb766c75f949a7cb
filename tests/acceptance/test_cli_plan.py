"""`gradsurgeon plan`: models of every kind, and none at all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, call_here, environment, refused, write_rules

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
    def test_json_and_nothing_else_on_stdout(self, here: Path) -> None:
        done = call("plan", "edits.yaml", "--model", "net:build", "--format", "json", cwd=here)
        assert done.returncode == 0
        assert json.loads(done.stdout) == {
            "version": 1,
            "model": {"params": 4, "elements": 23},
            "rules": [
                {
                    "id": "norms",
                    "action": "norm-log",
                    "tensor": "grad",
                    "point": "accumulated",
                    "hook": "end of backward",
                    "params": ["0.weight", "0.bias", "1.weight", "1.bias"],
                    "modules": [],
                    "elements": 23,
                    "warnings": [],
                },
                {
                    "id": "no-bias",
                    "action": "zero",
                    "tensor": "grad",
                    "point": "backward",
                    "hook": "tensor hook",
                    "params": ["0.bias", "1.bias"],
                    "modules": [],
                    "elements": 5,
                    "warnings": [
                        "zero is not freeze: weight decay and momentum still move the weight"
                    ],
                },
            ],
            "chains": {
                "0.weight": ["norms"],
                "0.bias": ["no-bias", "norms"],
                "1.weight": ["norms"],
                "1.bias": ["no-bias", "norms"],
            },
            "warnings": [],
        }
        assert done.stderr.splitlines() == [
            "printed by the import",
            "printed by the build",
            "on meta",
        ]

    def test_a_model_that_needs_values_is_built_for_real(self, here: Path) -> None:
        arguments = ("plan", "clean.yaml", "--model", "net:reads_a_value", "--format", "json")
        done = call_here(*arguments, cwd=here)
        assert done.returncode == 0
        assert json.loads(done.stdout)["model"] == {"params": 2, "elements": 15}
        assert re.search(
            r"^cannot build it on the meta device \(RuntimeError: .*\): building it with values$",
            done.stderr,
            re.MULTILINE,
        )

    @pytest.mark.parametrize("name", ["Net", "Zoo.Net", "ready"])
    def test_a_class_or_a_module_will_do(self, here: Path, name: str) -> None:
        done = call_here(
            "plan", "clean.yaml", "--model", f"net:{name}", "--format", "json", cwd=here
        )
        assert json.loads(done.stdout)["rules"][0]["params"] == ["fc.weight", "fc.bias"]

    def test_the_installed_command_finds_the_current_folder(self, here: Path) -> None:
        # A console script has its own folder, not the current one, on the path.
        code = 'import sys\nsys.path.remove("")\nfrom gradsurgeon.cli import main\nsys.exit(main())'
        done = call("plan", "clean.yaml", "--model", "net:Net", cwd=here, code=code)
        assert done.returncode == 0
        assert done.stdout.startswith("plan: clean.yaml on Net: 1 rule, 2 parameters, 6 elements\n")

    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            ("net", "`--model net` names no model: write MODULE:NAME, such as train.net:build"),
            (
                "a/net.py:b",
                "`--model a/net.py:b` names no model: write MODULE:NAME, such as train.net:build",
            ),
            ("net:nope", "`net` has no `nope`"),
            ("net:number", "`net:number` must be or give a torch.nn.Module, it gives a value"),
            (
                "net:not_a_module",
                "`net:not_a_module` must be or give a torch.nn.Module, it gives a value",
            ),
            ("net:fails", "cannot build `net:fails`:\nTraceback (most recent call last):\n  File"),
            ("net:ends", "SystemExit: usage: net.py"),
            ("nosuch:build", "\nModuleNotFoundError: No module named 'nosuch'"),
        ],
    )
    def test_no_model(self, here: Path, model: str, reason: str) -> None:
        done = call_here("plan", "clean.yaml", "--model", model, cwd=here)
        refused(done)
        assert reason in done.stderr
        assert "gradsurgeon/cli" not in done.stderr

    def test_rules_that_match_nothing(self, here: Path) -> None:
        done = call_here(
            "plan", "astray.yaml", "--model", "net:build", "--format", "json", cwd=here
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert 'astray.yaml:3:43: rule norms: no parameter of the model matches "head.*"' in (
            done.stderr
        )

    def test_wrong_rules_are_told_before_a_model_is_built(self, here: Path) -> None:
        done = call_here("plan", "wrong.yaml", "--model", "net:build", cwd=here)
        assert (done.returncode, done.stdout) == (1, "")
        assert "wrong.yaml:3:25: error: unknown action `norm-lg`" in done.stderr
        assert "printed" not in done.stderr

    def test_a_missing_rule_file_is_told_apart(self, here: Path) -> None:
        done = call_here("plan", "gone.yaml", "--model", "net:build", cwd=here)
        refused(done)
        assert "gone.yaml:1:1: error: cannot read the file: No such file" in done.stderr

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
