"""`skip-step` with a fused optimizer on a device: it reads a flag there, the report follows."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from laws.test_no_waiting import Reads
from models import data, memory, same
from torch import nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError, _torch
from gradsurgeon.store.run import open_run

NAN, INF = float("nan"), float("inf")
TRAP = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
}


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "is_host", lambda _: False)


def rules(*more: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [*more, {**TRAP, **options}]}


def make(kind: str = "AdamW") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    sort, options = KINDS[kind]
    return model, sort(model.parameters(), fused=True, **options)


def backward(model: nn.Sequential, number: int, fault: float | None = None) -> None:
    out = model[:2](data(number, 5, 4))
    if fault is not None:
        out.register_hook(lambda grad: grad.clone().fill_diagonal_(fault))
    model[2:](out).square().mean().backward()


def step(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, number: int, fault: float | None = None
) -> None:
    optimizer.zero_grad()
    backward(model, number, fault)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [NAN, INF])
@pytest.mark.parametrize("faulty", [{0}, {3}, {0, 1, 5}])
def test_a_skipped_step_is_as_if_it_had_not_been(kind: str, fault: float, faulty: set[int]) -> None:
    plain, plain_optimizer = make(kind)
    model, optimizer = make(kind)
    with gradsurgeon.apply(model, rules(), optimizer=optimizer) as session:
        for number in range(8):
            if number not in faulty:
                step(plain, plain_optimizer, number)
            step(model, optimizer, number, fault if number in faulty else None)
            assert same(memory(plain, plain_optimizer), memory(model, optimizer))
            assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
        assert session.step == 8
    kinds = [(e.kind, e.step, e.rule, e.name) for e in session.events]
    both = [("trap", "0.bias"), ("skipped-step", "0.bias")]
    assert kinds == [(word, n, "trap", name) for n in sorted(faulty) for word, name in both]
    status = session.status()["trap"]
    assert (status.fired, status.changed, status.last_step) == (8, len(faulty) / 8, 7)


def test_the_report_is_the_one_that_the_host_would_have_written() -> None:
    texts = []
    for fused in (True, False):
        model, optimizer = make()
        for group in optimizer.param_groups:
            group["fused"] = fused
        with gradsurgeon.apply(model, rules(), optimizer=optimizer) as session:
            for number in range(3):
                step(model, optimizer, number, NAN if number == 2 else None)
        texts.append([event.message.splitlines() for event in session.events])
    late, prompt = texts
    assert "2 of 6 gradients are not finite after backward" in late[0][0]
    rows = [[" ".join(line.split()[:3]) for line in text[0]] for text in texts]
    # How many elements there are is not known any more.
    assert rows[0] == [row.removesuffix(" elements") for row in rows[1]]
    assert late[0][:3] == prompt[0][:3]
    assert late[0][-1] == prompt[0][-1]
    assert late[1] == prompt[1]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read(kind: str) -> None:
    model, optimizer = make(kind)
    clip = {"id": "c", "action": "clip-norm", "params": "*", "at": "step", "max_norm": 0.1}
    log = {"id": "n", "action": "norm-log", "params": "*"}
    with gradsurgeon.apply(model, rules(clip, log), optimizer=optimizer):
        step(model, optimizer, 0)
        # More than one flush, and a fault.
        with Reads() as counted:
            for number in range(1, 9):
                step(model, optimizer, number, NAN if number == 4 else None)
        own = counted.seen
    plain, plain_optimizer = make(kind)
    step(plain, plain_optimizer, 0)
    with Reads() as counted:
        for number in range(1, 9):
            step(plain, plain_optimizer, number)
    assert own == counted.seen


def test_events_come_by_themselves_with_the_next_flush(tmp_path: pathlib.Path) -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(), optimizer=optimizer, record=tmp_path):
        for number in range(40):
            step(model, optimizer, number, NAN if number == 3 else None)
        with open_run(tmp_path) as run:
            found = [(e.kind, e.step, e.name) for e in run.events]
    assert found == [("trap", 3, "0.bias"), ("skipped-step", 3, "0.bias")]


def test_giving_up_comes_late_but_comes() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(give_up_after=3), optimizer=optimizer) as session:
        for number in (0, 1):
            step(model, optimizer, number)
        before = memory(model, optimizer)
        with pytest.raises(NonFiniteGradientError, match="giving up: tripped 3 times") as caught:
            for number in range(2, 60):
                step(model, optimizer, number, NAN)
        assert (caught.value.step, caught.value.rule, caught.value.name) == (4, "trap", "0.bias")
        assert session.step < 40
        assert same(before, memory(model, optimizer))
        assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


def test_good_steps_in_between_count_from_the_beginning() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(give_up_after=3), optimizer=optimizer) as session:
        for number in range(60):
            step(model, optimizer, number, NAN if number % 3 else None)
    assert [e.kind for e in session.events].count("skipped-step") == 40


def test_a_trap_that_is_due_now_and_then_knows_of_the_others() -> None:
    model, optimizer = make()
    hard = {"id": "hard", "action": "nan-trap", "params": "*", "steps": {"every": 5}}
    with (
        gradsurgeon.apply(model, rules(hard), optimizer=optimizer),
        pytest.raises(NonFiniteGradientError) as caught,
    ):
        for number in range(1, 10):
            step(model, optimizer, number, NAN if number > 3 else None)
    # Steps count from 0: step 5 is the first at which `hard` looks at a fault.
    assert (caught.value.rule, caught.value.step) == ("hard", 5)


def test_large_finite_gradients_are_no_alarm() -> None:
    weight = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1e-38, fused=True)
    before = weight.weight.detach().clone()
    with gradsurgeon.apply(weight, rules(), optimizer=optimizer) as session:
        (weight.weight * 1e38).sum().backward()
        optimizer.step()
        assert session.events == []
    assert not torch.equal(before, weight.weight)


def test_a_gradient_that_the_script_breaks_or_repairs() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(), optimizer=optimizer) as session:
        step(model, optimizer, 0)
        before = memory(model, optimizer)
        optimizer.zero_grad()
        backward(model, 1)
        dict(model.named_parameters())["2.weight"].grad[1, 1] = INF  # type: ignore[index]
        optimizer.step()
        assert same(before, memory(model, optimizer))
        optimizer.zero_grad()
        backward(model, 2, NAN)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_()
        optimizer.step()
        assert not same(before, memory(model, optimizer))
    kinds = [(e.kind, e.step, e.name) for e in session.events]
    assert kinds == [
        ("trap", 1, "2.weight"),
        ("skipped-step", 1, "2.weight"),
        ("notice", 2, "0.weight"),
    ]
    assert "something in between did it" in session.events[0].message


def test_the_micro_batch_is_named() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(), optimizer=optimizer) as session:
        step(model, optimizer, 0)
        optimizer.zero_grad()
        for part in range(4):
            backward(model, part, NAN if part == 2 else None)
        optimizer.step()
    assert "after backward, micro-batch 3 of 4" in session.events[0].message


@pytest.mark.parametrize("what", ["closure", "raise", "freeze", "float64", "site", "not fused"])
def test_where_the_host_has_to_know_it_is_asked(what: str) -> None:
    model, optimizer = make()
    more: list[dict[str, Any]] = []
    options: dict[str, Any] = {}
    if what == "freeze":
        more = [{"id": "f", "action": "freeze", "params": "0.bias"}]
    if what == "site":
        more = [{"id": "s", "action": "nan-trap", "modules": "0", "tensor": "output.grad"}]
    if what == "raise":
        options = {"then": "raise"}
    if what == "float64":
        model.double()
    if what == "not fused":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def one(number: int) -> None:
        optimizer.zero_grad()
        kind = next(model.parameters()).dtype
        model(data(number, 5, 4).to(kind)).square().mean().backward()
        stepping: Any = optimizer.step
        stepping((lambda: None) if what == "closure" else None)

    with gradsurgeon.apply(model, rules(*more, **options), optimizer=optimizer):
        one(0)
        with Reads() as counted:
            one(1)
    assert "tolist" in counted.seen


def test_a_step_that_fails_leaves_no_flag() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, rules(), optimizer=optimizer):
        step(model, optimizer, 0)
        rate = optimizer.param_groups[0].pop("lr")
        with pytest.raises(KeyError):
            step(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = rate
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    copy.deepcopy(optimizer.state_dict())
