"""`gradsurgeon params`, and `plan` on what it has here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, call_here, write_rules

pytestmark = pytest.mark.slow

NET = """
from torch import nn
class Transformer(nn.Module):
    def __init__(self, layers, width, hidden, words):
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            block = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in "qkvo"})
            block["up"] = nn.Linear(width, hidden, bias=False)
            block["down"] = nn.Linear(hidden, width, bias=False)
            self.layers.append(block)
def small():
    return Transformer(2, 4, 8, 10)
def huge():
    return Transformer(80, 8192, 32768, 128256)
"""
TRAIN = """
import torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
except Exception as error:
    print(error)
torch.save(net.state_dict(), "checkpoint.pt")
"""
RULES = """version: 1
rules:
  - {id: flat, action: clamp, params: "*", where: {module_type: Linear}, at: step, min: -1, max: 1}
  - {id: own, action: zero, params: "*", model: "Transf*", at: step}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path


class TestParams:
    def test_a_model_of_billions_costs_no_memory(self, here: Path) -> None:
        # 262 GB of weights: 2 GB of address space above that of torch would not hold one layer.
        code = (
            "import resource, sys, torch\n"
            "before = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (before + (2 << 30),) * 2)\n"
            "from gradsurgeon.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        done = call("params", "--model", "net:huge", "-o", "params.json", cwd=here, code=code)
        assert done.returncode == 0, done.stderr
        assert "481 parameters, 65,475,182,592 elements" in done.stderr

    def test_devices_are_written_to_and_not_replaced(self, here: Path) -> None:
        done = call("params", "--model", "net:small", "-o", "/dev/stdout", cwd=here)
        assert json.loads(done.stdout)["origin"] == "Transformer"
        assert Path("/dev/stdout").is_symlink()

    def test_a_script_without_a_main_guard_trains_no_second_time(self, here: Path) -> None:
        (here / "train.py").write_text(TRAIN)
        done = call("params", "--model", "train:Net", "-o", "/dev/stdout", cwd=here)
        assert json.loads(done.stdout)["origin"] == "Net"
        told = "`train` trains when it is imported: stopped before its first update\n"
        assert done.stderr.startswith(told)
        assert not (here / "checkpoint.pt").exists()


class TestPlan:
    def test_weights_name_parameters_as_well(self, here: Path) -> None:
        header = json.dumps({"fc.bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})
        raw = len(header).to_bytes(8, "little") + header.encode() + bytes(12)
        (here / "model.safetensors").write_bytes(raw)
        done = call(
            *("plan", "clean.yaml", "--params", "model.safetensors"),
            cwd=here,
            code=WITHOUT_TORCH,
        )
        assert done.returncode == 0
        head = "plan: clean.yaml on model.safetensors: 1 rule, 1 parameter, 3 elements"
        assert done.stdout.startswith(head)
        assert "names come from model.safetensors: it does not tell buffers" in done.stdout
        done = call_here("plan", "rules.yaml", "--params", "model.safetensors", cwd=here)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            "rule flat: `model`, `module_type` and `requires_grad` cannot be decided" in done.stderr
        )
        assert (
            "rule own: `model`, `module_type` and `requires_grad` cannot be decided" in done.stderr
        )
