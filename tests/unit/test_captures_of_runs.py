"""What a run directory holds of captured tensors: numbers of each tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import call_here, environment
from models import data
from ranks import Json
from small import rule_file, sgd
from torch import Tensor, nn

import gradsurgeon

TAGS = {"id": "tags", "action": "capture", "tensors": "*", "tensor": "value"}


class Tagging(nn.Module):
    """Gives names to whatever tensors it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        for name, tensor in tensors.items():
            gradsurgeon.tag(tensor, name)
        return self.weight * 2


# What an entry may lack.
NOTHING = {
    **dict.fromkeys(("shape", "low", "high", "mean", "note")),
    "nonfinite": 0,
}


def read(path: Path) -> list[Any]:
    with gradsurgeon.open_run(path) as run:
        found = list(run.recorded().captured)
    entries: list[Any] = json.loads(
        json.dumps(found), object_hook=lambda entry: SimpleNamespace(**{**NOTHING, **entry})
    )
    return entries


def kept(path: Path, tensors: Mapping[str, Tensor], **rule: Any) -> Json:
    """Return by name what a run holds of tensors that were seen in one step."""
    model = Tagging()
    with gradsurgeon.apply(model, rule_file({**TAGS, **rule}), optimizer=[], record=path):
        model(tensors)
    (found,) = read(path)
    assert (found.rule, found.more) == ("tags", max(0, len(tensors) - 16))
    return {one.name: one for one in found.tensors}


def test_the_numbers_of_a_tensor_are_those_of_numpy(tmp_path: Path) -> None:
    tensor = data(3, 40, 50) * 3
    tensor[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    one = kept(tmp_path / "run", {"x": tensor.t()})["x"]
    finite = tensor.flatten()[3:].double().numpy()
    assert (one.shape, one.dtype, one.step, one.call) == ([50, 40], "torch.float32", 0, 0)
    assert one.nonfinite == 3
    assert (one.low, one.high) == (finite.min(), finite.max())
    assert one.mean == pytest.approx(finite.mean())
    assert one.note == ""


def test_a_large_tensor_is_measured_by_its_first_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.records.captured._MOST", 7)
    one = kept(tmp_path / "run", {"x": torch.arange(30.0).view(5, 6)})["x"]
    assert (one.shape, one.low, one.high) == ([5, 6], 0.0, 6.0)
    assert one.note == "of the first 7 elements"


@pytest.mark.filterwarnings("ignore:.*(sparse|Sparse|quantiz|nested)")
def test_tensors_of_any_kind(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    found = kept(
        tmp_path / "run",
        {
            "empty": torch.zeros(0, 3, 4, 4),
            "scalar": torch.tensor(2.5),
            "float8": torch.tensor([0.5, torch.nan, 2.0]).to(torch.float8_e4m3fn),
            "complex": torch.tensor([3 + 4j, 0j]),
            "sparse": sparse,
            "bool": torch.tensor([True, False, True]),
            "int": torch.tensor([2**40, -7]),
            "wide": torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
            "quantized": torch.quantize_per_tensor(torch.ones(1, 2, 2, 2), 0.5, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        },
    )
    ends = {name: (one.low, one.mean, one.high) for name, one in found.items()}
    assert ends == {
        "empty": (None, None, None),
        "scalar": (2.5, 2.5, 2.5),
        "float8": (0.5, 1.25, 2.0),
        "complex": (0.0, 2.5, 5.0),
        "sparse": (None, None, None),
        "bool": (0.0, pytest.approx(2 / 3), 1.0),
        "int": (-7.0, (2**40 - 7) / 2, 2.0**40),
        "wide": (-1.7e308, 0.0, 1.7e308),
        "quantized": (None, None, None),
        "nested": (None, None, None),
    }
    assert found["float8"].nonfinite == 1
    assert found["scalar"].shape == []
    assert "magnitudes" in found["complex"].note
    for name in ("sparse", "quantized"):
        assert found[name].note == "cannot be shown: it is sparse or quantized"
    assert "cannot be shown" in found["nested"].note


def test_a_tensor_that_is_divided_over_ranks_is_told_of(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = tmp_path / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(torch.ones(2, 3, 4, 4), mesh, [Shard(0)])
        one = kept(tmp_path / "run", {"x": sharded, "y": torch.ones(2)})["x"]
    finally:
        torch.distributed.destroy_process_group()
    assert "DTensor" in one.note
    assert one.low is None


def test_of_each_tensor_the_newest_step_and_last_call(tmp_path: Path) -> None:
    model = Tagging()
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, rule_file(TAGS), record=tmp_path / "run"):
        for step in range(3):
            names = ["x", "x"] if step == 2 else ["x", "early"]
            for number, name in enumerate(names):
                loss = model({name: torch.tensor(10.0 * step + number)})
            loss.backward()
            optimizer.step()
    (found,) = read(tmp_path / "run")
    assert [(one.name, one.step, one.call, one.low) for one in found.tensors] == [
        ("x", 2, 1, 21.0),
        ("early", 1, 0, 11.0),
    ]
    report = call_here("report", "run", cwd=tmp_path).stdout
    table = report[report.index("captures kept by tags") :].splitlines()
    assert table[2].split() == [
        "x",
        "2",
        "1",
        "a",
        "single",
        "number",
        "float32",
        "21",
        "21",
        "21",
        "-",
    ]
    assert "`session.captured(RULE)`" in report


def test_a_run_that_kept_nothing_has_no_table(tmp_path: Path) -> None:
    model = Tagging()
    rules = [{"id": "n", "action": "norm-log", "params": "*"}, TAGS]
    with gradsurgeon.apply(model, {"version": 1, "rules": rules}, record=tmp_path):
        model({}).backward()
    assert read(tmp_path) == []
    assert "captures" not in call_here("report", ".", cwd=tmp_path).stdout


def test_any_name_can_be_read_again(tmp_path: Path) -> None:
    names = ["\udc80", "</script>", 'a"b\n']
    assert list(kept(tmp_path / "run", dict.fromkeys(names, torch.ones(1)))) == [
        "\\udc80",
        *names[1:],
    ]


_SCRIPT = """
import sys, torch, gradsurgeon
model = torch.nn.Linear(2, 2)
rules = {"version": 1, "rules": [{"id": "grads", "action": "capture", "params": "*"}]}
session = gradsurgeon.apply(model, rules, record=sys.argv[1])
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
if len(sys.argv) > 2:
    raise RuntimeError("training ends here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("raise",)])
def test_a_script_that_ends_without_closing_has_them(tmp_path: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "run"), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == len(more)
    (found,) = read(tmp_path / "run")
    assert {one.name: one.low for one in found.tensors} == {"weight": 1.0, "bias": 1.0}
