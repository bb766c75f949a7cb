"""`gradsurgeon params`, and `plan` on what it has written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, call_here, quiet, refused, write_rules

pytestmark = pytest.mark.slow

NET = """
import torch
from torch import nn
print("printed by the import")
class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.attn = nn.ModuleDict({k: nn.Linear(width, width, bias=False) for k in "qkvo"})
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.act = nn.ReLU(inplace=True)
class Transformer(nn.Module):
    def __init__(self, layers, width, hidden, words):
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.LayerNorm(width)
        self.norm.bias.requires_grad_(False)
        self.twice = self.layers[0].norm
def small():
    return Transformer(2, 4, 8, 10)
def huge():
    return Transformer(80, 8192, 32768, 128256)
def wider():
    net = Transformer(3, 4, 8, 10)
    net.layers[1].up = nn.Linear(4, 9, bias=False)
    del net.twice
    return net
def fails():
    raise OSError("no data")
"""

RULES = """version: 1
rules:
  - {id: norms, action: norm-log, params: "*"}
  - {id: flat, action: clamp, params: "*", where: {module_type: Linear}, at: step, min: -1, max: 1}
  - {id: tied, action: scale, params: "head.weight", factor: 0.5}
  - {id: acts, action: norm-log, modules: "*.act", tensor: input.grad}
  - {id: shared, action: norm-log, modules: "twice", tensor: output}
  - {id: own, action: zero, params: "norm.bias", model: "Transf*", at: step}
  - {id: tags, action: norm-log, tensors: "hidden"}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what the command writes; it takes seconds to import torch."""
    folder = tmp_path_factory.mktemp("params")
    (folder / "net.py").write_text(NET)
    done = call_here("params", "--model", "net:small", "-o", "params.json", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.search(
        r"^params.json: Transformer, 19 parameters, 320 elements, sha256:[0-9a-f]{64}$",
        done.stderr,
        re.MULTILINE,
    )
    assert sorted(path.name for path in folder.glob("params*")) == ["params.json"]
    return (folder / "params.json").read_text()


@pytest.fixture
def written(here: Path, once: str) -> Path:
    (here / "params.json").write_text(once)
    return here


class TestParams:
    def test_stdout_holds_the_manifest_and_nothing_else(self, here: Path) -> None:
        done = call("params", "--model", "net:small", cwd=here)
        found = json.loads(done.stdout)
        assert list(found) == ["version", "origin", "hash", "params", "modules"]
        assert found["params"][0] == {
            "name": "emb.weight",
            "aliases": ["head.weight"],
            "shape": [10, 4],
            "dtype": "float32",
            "requires_grad": True,
            "module_type": ["Embedding", "Module", "Linear"],
        }
        assert found["modules"][0] == {"name": ".", "type": ["Transformer", "Module"]}
        assert "printed by the import" in done.stderr

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
        assert "643 parameters, 65,476,509,696 elements" in done.stderr

    def test_a_file_that_cannot_be_written_leaves_nothing(self, here: Path) -> None:
        done = call_here("params", "--model", "net:small", "-o", "no/params.json", cwd=here)
        refused(done)
        assert "gradsurgeon: cannot write no/params.json: No such file" in done.stderr

    def test_devices_are_written_to_and_not_replaced(self, here: Path) -> None:
        done = call("params", "--model", "net:small", "-o", "/dev/stdout", cwd=here)
        assert json.loads(done.stdout)["origin"] == "Transformer"
        assert Path("/dev/stdout").is_symlink()

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ((), "the following arguments are required: --model"),
            (("--model", "net:fails"), "cannot build `net:fails`:\nTraceback"),
        ],
    )
    def test_what_it_cannot_do(self, here: Path, arguments: tuple[str, ...], reason: str) -> None:
        done = call_here("params", *arguments, cwd=here)
        refused(done)
        assert reason in done.stderr


class TestPlan:
    @pytest.mark.parametrize("form", ["json", "text"])
    def test_it_is_the_plan_of_the_model_without_torch(self, written: Path, form: str) -> None:
        end = ("--format", form)
        known = call_here("plan", "rules.yaml", "--model", "net:small", *end, cwd=written)
        done = call(
            "plan", "rules.yaml", "--params", "params.json", *end, cwd=written, code=WITHOUT_TORCH
        )
        quiet(done)
        assert done.stdout == known.stdout

    def test_weights_name_parameters_as_well(self, written: Path) -> None:
        header = json.dumps({"fc.bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})
        raw = len(header).to_bytes(8, "little") + header.encode() + bytes(12)
        (written / "model.safetensors").write_bytes(raw)
        done = call(
            *("plan", "clean.yaml", "--params", "model.safetensors"),
            cwd=written,
            code=WITHOUT_TORCH,
        )
        assert done.returncode == 0
        head = "plan: clean.yaml on model.safetensors: 1 rule, 1 parameter, 3 elements"
        assert done.stdout.startswith(head)
        assert "names come from model.safetensors: it does not tell buffers" in done.stdout
        done = call_here("plan", "rules.yaml", "--params", "model.safetensors", cwd=written)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            "rule flat: `model`, `module_type` and `requires_grad` cannot be decided" in done.stderr
        )
        assert (
            "rule own: `model`, `module_type` and `requires_grad` cannot be decided" in done.stderr
        )

    @pytest.mark.parametrize("sources", [(), ("--params", "params.json", "--model", "net:small")])
    def test_one_source_of_names_exactly(self, written: Path, sources: tuple[str, ...]) -> None:
        done = call_here("plan", "clean.yaml", *sources, cwd=written)
        refused(done)
        assert "--model" in done.stderr

    def test_a_wrong_manifest_is_no_fault_of_the_rules(self, written: Path) -> None:
        (written / "params.json").write_text('{"version": 1, "params": 3}')
        done = call_here("plan", "clean.yaml", "--params", "params.json", cwd=written)
        refused(done)
        assert "params.json: error: missing key `origin`" in done.stderr
