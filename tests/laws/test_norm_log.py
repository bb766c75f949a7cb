"""Records of module tensors: those of hooks written by hand, however they are measured and stored."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import data
from pairs import singly
from ranks import Json
from small import attach, linears, sgd, steps_of, take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gradsurgeon
from gradsurgeon import GradSurgeonWarning
from gradsurgeon.records import recorder

WIDTHS = {"few": 4, "many": 40}  # 40 * 40 elements are too many to be copied


class Busy(nn.Module):
    """A module is called three times, one in every other step only, and outputs are written in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.cell = nn.Linear(width, width)
        self.rare = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        for _ in range(3):
            x = self.cell(x)
        if self.calls % 2:
            x = self.rare(x)
        self.calls += 1
        return x.mul_(0.5)


def logging(tensor: str, **more: Any) -> Json:
    rule = {"id": tensor.replace(".", "-"), "action": "norm-log", "modules": "*", "tensor": tensor}
    return {**rule, **more}


@contextmanager
def told_by(session: gradsurgeon.Session, path: Path) -> Iterator[list[Any]]:
    """Yield a session and its run, which tell the same."""
    with gradsurgeon.open_run(path) as run:
        yield [session, run]


def train(model: nn.Module, width: int, steps: int = 6) -> None:
    optimizer = sgd(model, 0.01)
    for step in range(steps):
        take_step(optimizer, model(data(step, 40, width)).square().mean())


def by_hand(width: int) -> dict[tuple[str, str], list[float]]:
    """Return the norms that closures read at once."""
    torch.manual_seed(0)
    model = Busy(width)
    norms = defaultdict[tuple[str, str], list[float]](list)

    def note(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        norms[name, "output"].append(output.norm().item())
        output.register_hook(lambda grad: norms[name, "output.grad"].append(grad.norm().item()))

    for name, module in model.named_children():
        module.register_forward_hook(partial(note, name))
    train(model, width)
    return norms


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_norms_are_those_of_closures(width: int, tmp_path: Path) -> None:
    expected = by_hand(width)
    torch.manual_seed(0)
    model = Busy(width)
    path = tmp_path / "run"
    with attach(model, logging("output"), logging("output.grad"), record=path) as session:
        train(model, width)
    with told_by(session, path) as both:
        for (name, tensor), norms in expected.items():
            for records in both:
                history = records.history(name, rule=tensor.replace(".", "-"))
                assert [value for _, value in history] == pytest.approx(norms, rel=1e-6)
    assert steps_of(session, "rare", rule="output") == [1, 3, 5]
    assert steps_of(session, "cell", rule="output") == [step for step in range(6) for _ in range(3)]


def test_modules_that_run_together_share_a_row(tmp_path: Path) -> None:
    model = linears(*[4] * 31)
    with attach(model, logging("output", stats=["l2", "max"]), record=tmp_path / "run"):
        train(model, 4, steps=5)
    with closing(sqlite3.connect(tmp_path / "run" / "rank-0.db")) as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (2 * 5,)


def test_a_loop_without_steps_is_recorded_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_PENDING", 8)
    model = linears(4, 4, 4)
    with attach(model, logging("output")) as session:
        norms = [model[0](data(step, 5, 4)).norm().item() for step in range(20)]
        assert len(session._attachment.context.recorder._pending) < 8
        assert [value for _, value in session.history("0")] == pytest.approx(norms)
        # What is asked for in the middle of a step is there as well.
        norms.append(model[0](data(20, 5, 4)).norm().item())
        assert session.latest("0") == pytest.approx(norms[-1])


@singly(
    steps=[{"from": 3}, {"to": 3}, {"from": 2, "to": 5}, {"every": 3}, {"from": 1, "every": 2}],
    tensor=["output", "input", "output.grad", "input.grad"],
)
def test_a_rule_that_rests_wakes_in_its_steps(tensor: str, steps: dict[str, int]) -> None:
    model = linears(4, 4, 4)
    with attach(model, logging(tensor, steps=steps)) as session:
        train(model, 4, steps=8)
    (rule,) = session.plan.rules.rules
    due = [step for step in range(8) if rule.steps.includes(step)]
    assert steps_of(session, "1") == due


def test_a_rule_that_rests_goes_by_the_optimizer_that_its_module_has_now() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    first, second = (sgd(m) for m in model.values())
    entry = logging("output", steps={"from": 2, "to": 4})
    with attach(model, entry, optimizer=first) as session:
        for optimizer in (first, second):
            for step in range(6):
                (model["a"](data(step, 5, 4)) + model["b"](data(step, 5, 4))).sum().backward()
                optimizer.step()
    assert steps_of(session, "a") == [2, 3]
    # The second optimizer is looked for after three steps of the first, and counts from 0.
    assert steps_of(session, "b") == [2, 2, 3]


@pytest.mark.parametrize("tensor", ["output", "output.grad"])
def test_a_module_called_more_often_than_before_keeps_all_its_records(
    tensor: str, tmp_path: Path
) -> None:
    """One of many modules is called as often as the step is long."""
    model = linears(*[2] * 22)
    calls = [1, 1, 6, 2, 1]
    path = tmp_path / "run"
    optimizer = sgd(model, 0.01)
    with attach(model, logging(tensor), optimizer=optimizer, record=path) as session:
        for step, times in enumerate(calls):
            x = model[:20](data(step, 3, 2))
            for _ in range(times):
                x = model[20](x)
            x.sum().backward()
            optimizer.step()
            session.history("20")  # what waits is measured step by step
    expected = [step for step, times in enumerate(calls) for _ in range(times)]
    with told_by(session, path) as both:
        for records in both:
            assert steps_of(records, "20") == expected
            assert steps_of(records, "3") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_script_may_set_a_default_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Busy(4)
    path = tmp_path / "run"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with attach(model, logging("output"), record=path) as session:
            # A pass in which modules are left out has a row with empty columns.
            for part in (model, model.first, model):
                part(torch.ones(2, 4, dtype=torch.float32))
                session.history("first")
    finally:
        torch.set_default_dtype(before)
    with gradsurgeon.open_run(path) as run:
        for name, times in (("first", 3), ("cell", 6), ("rare", 1)):
            assert run.history(name) == session.history(name)
            assert len(run.history(name)) == times


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64)


def test_what_complex_numbers_do_not_have_is_left_alone_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Complex())
    entries = [
        logging("output", stats=["l2", "max"]),
        logging("output.grad", stats=["l2", "mean"]),
        {"id": "bound", "action": "clamp", "modules": "1", "tensor": "output", "min": -1},
        {"id": "plain", "action": "norm-log", "modules": "*", "tensor": "output"},
    ]
    session = attach(model, *entries)
    with pytest.warns(GradSurgeonWarning, match="left 1 alone: complex numbers"):
        out = model(data(0, 3, 4))
        out.abs().sum().backward()
    warned = {rule: bool(status.warnings) for rule, status in session.status().items()}
    assert warned == {"output": True, "output-grad": True, "bound": True, "plain": False}
    assert session.latest("1", rule="plain") == pytest.approx(out.detach().norm().item())
    assert len(session.history("0", "max", rule="output")) == 1


def test_a_module_of_two_names_is_asked_for_by_either(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    path = tmp_path / "run"
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with attach(model, logging("output"), record=path) as session:
        model(data(0, 2, 3))
    with told_by(session, path) as both:
        for records in both:
            assert len(records.history("0")) == 2
            assert records.history("2") == records.history("0")
            assert records.latest("2") == records.latest("0")


class Divided(nn.Module):
    """Returns a tensor that is divided over ranks, as tensor parallel layers can be asked to do."""

    def forward(self, x: Tensor) -> Tensor:
        mesh = init_device_mesh("cpu", (1,))
        return DTensor.from_local(x, mesh, [Shard(0)])


def test_what_is_divided_over_ranks_is_not_measured_and_named(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 3), Divided())
        trap = {"id": "trap", "action": "nan-trap", "modules": "1", "tensor": "output"}
        optimizer = sgd(model, 0.01)
        session = attach(model, logging("output"), trap, optimizer=optimizer)
        with pytest.warns(GradSurgeonWarning, match="sharded over ranks"):
            model(data(0, 2, 3)).to_local().sum().backward()
        optimizer.step()
        assert len(session.history("0")) == 1
        assert session.history("1") == []
        model(torch.full((2, 3), math.nan)).to_local().sum().backward()
        with pytest.raises(gradsurgeon.NonFiniteGradientError, match="output of 1"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
