"""`freeze` is a true skip, `clip-norm` is `clip_grad_norm_`, `capture` keeps what was there."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from models import CASES, data
from pairs import singly
from ranks import Json
from small import attach, kinds_of, rule_file, sgd, take_step, tanh_net
from torch import nn

import gradsurgeon
from gradsurgeon import BindError
from gradsurgeon.tensors import _numbers


def make() -> Any:
    torch.manual_seed(2)
    return tanh_net(4, 6, 2)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0
) -> None:
    take_step(optimizer, model(data(number, 5, 4)).square().mean() * scale)


# --- freeze ---------------------------------------------------------------------------------------


def test_frozen_from_the_start_leaves_no_state_and_zero_does_not_freeze() -> None:
    moved = {}
    for action in ("freeze", "zero"):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = model[0].weight.detach().clone()
        entry = {"action": action, "params": "0.*", "at": "step"}
        with gradsurgeon.apply(model, rule_file(entry, params="*")):
            for number in range(3):
                step(model, optimizer, number)
        moved[action] = not torch.equal(before, model[0].weight)
        assert (model[0].weight in optimizer.state) == (action == "zero")
    assert moved == {"freeze": False, "zero": True}


def test_lbfgs_and_hand_written_updates_are_refused() -> None:
    model = make()
    freeze = rule_file({"action": "freeze", "params": "0.*"}, params="*")
    optimizer: Any = torch.optim.LBFGS(model.parameters())
    with pytest.raises(BindError, match=r"rule r0: LBFGS moves all parameters together"):
        gradsurgeon.apply(model, freeze, optimizer=optimizer)
    assert model[0].weight._backward_hooks is None
    del optimizer
    with gradsurgeon.apply(model, freeze, optimizer=[]) as session:
        model(data(0, 5, 4)).sum().backward()
        with pytest.raises(BindError, match=r"rule r0: weights are updated by hand"):
            session.tick()


# --- clip-norm ------------------------------------------------------------------------------------


NAMES = [name for name, case in CASES.items() if not case.sparse and not case.half]


@singly(name=NAMES, at=["step", "backward", "rule"], norm_type=[2, "inf"], max_norm=[0.05, 1e3])
def test_a_clip_equals_clip_grad_norm(name: str, at: str, norm_type: Any, max_norm: float) -> None:
    case = CASES[name]
    if case.twice and at == "backward":
        return  # it bounds each of the two passes there, which is another thing
    model, plain = case.make(), case.make()
    entry = {
        "action": "clip-norm",
        "per": "parameter",
        "max_norm": max_norm,
        "norm_type": norm_type,
    }
    entry |= {"per": "rule"} if at == "rule" else {"at": at}
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, rule_file(entry, params="*"), optimizer=optimizer) as session:
        torch.manual_seed(0)
        case.backward(model, 0)
        optimizer.step()
    torch.manual_seed(0)
    case.backward(plain, 0)
    params = [p for p in plain.parameters() if p.grad is not None and p.grad.numel()]
    for group in [params] if at == "rule" else [[param] for param in params]:
        nn.utils.clip_grad_norm_(group, max_norm, float(norm_type))
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad, rtol=1e-6, atol=0.0)
    if at == "rule":
        assert session.status()["r0"].changed == (1.0 if max_norm == 0.05 else 0.0)


def python_calls(count: int) -> int:
    """Return how many functions of gradsurgeon an update calls that records, judges and shortens gradients."""
    model = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])
    optimizer = sgd(model)
    clip = {"action": "clip-norm", "per": "rule", "max_norm": 1e-3}
    seen: list[str] = []
    numbers: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_filename)

    wanted = rule_file({"action": "norm-log"}, {"action": "nan-trap"}, clip, params="*")
    with gradsurgeon.apply(model, wanted, optimizer=optimizer) as session:
        for _ in range(5):
            torch.stack([*model]).sum().backward()
            seen.clear()
            sys.setprofile(note)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            optimizer.zero_grad()
            numbers.append(sum("gradsurgeon" in name for name in seen))
        assert session.status()["r2"].changed == 1.0
    # Now and then the session looks whether the model has other parameters.
    return min(numbers)


def test_an_update_calls_as_many_functions_for_many_gradients_as_for_few() -> None:
    assert python_calls(10) == python_calls(50)


@pytest.mark.parametrize("per", ["parameter", "rule"])
def test_a_norm_that_is_not_finite_leaves_the_gradients_alone_and_is_an_event(per: str) -> None:
    model = make()
    optimizer = sgd(model, 0.0)
    entry = {"action": "clip-norm", "max_norm": 0.1, "per": per, "params": "2.*"}
    with gradsurgeon.apply(model, rule_file(entry, params="*")) as session:
        model(data(0, 5, 4)).sum().backward()
        model[2].bias.grad[0] = float("inf")
        before = [p.grad.clone() for p in model[2].parameters()]
        optimizer.step()
    assert torch.equal(model[2].bias.grad, before[1])
    assert torch.equal(model[2].weight.grad, before[0]) == (per == "rule")
    (event,) = session.events
    assert (event.kind, event.rule, event.step) == ("notice", "r0", 0)
    assert event.message == "the norm is not finite: the gradients were left alone"


def test_clip_of_a_module_gradient() -> None:
    model = make()
    entry = {
        "id": "c",
        "action": "clip-norm",
        "modules": "0",
        "tensor": "output.grad",
        "max_norm": 0.01,
    }
    kept = {"id": "k", "action": "capture", "modules": "0", "tensor": "output.grad"}
    with attach(model, entry, kept) as session:
        model(data(0, 5, 4)).square().sum().backward()
    (grad,) = session.captured("k").values()
    assert grad.norm().item() == pytest.approx(0.01, rel=1e-3)


# --- sanitize and capture -------------------------------------------------------------------------


# -------------------------------------------------------------------------------------------------
# A gradient whose elements are finite has its norm, though their squares overflow or vanish, and is cut.
# -------------------------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.bfloat16]
# Measured together with others, alone, and by a dot product.
SIZES = [4, 2000, 2**18]


def rule(**options: Any) -> Json:
    return rule_file({"id": "r", "params": "*", **options})


@singly(
    dtype=[*DTYPES, torch.complex64],
    unit=[1e30, 1e-20, 1e-30],
    size=SIZES,
    order=[1.0, 2.0, 3.0],
)
def test_the_norm_is_that_of_float64(
    dtype: torch.dtype, unit: float, size: int, order: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    grad = (torch.randn(size, generator=generator) * unit).to(dtype)
    wide = grad.to(torch.promote_types(dtype, torch.float64)) / unit
    wanted = float(torch.linalg.vector_norm(wide, order)) * unit
    small = torch.ones(3, dtype=dtype)
    measured = _numbers.norms([small, grad, small], order)
    assert measured.tolist() == pytest.approx(
        [3 ** (1 / order), wanted, 3 ** (1 / order)], rel=1e-4
    )
    assert float(_numbers.norm(grad, order)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("size", [*SIZES, 0])
def test_a_gradient_of_zeros_has_norm_0(size: int) -> None:
    zeros = torch.zeros(size)
    assert _numbers.norms([zeros, torch.ones(3000), zeros]).tolist()[::2] == [0.0, 0.0]
    assert float(_numbers.norm(zeros)) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_has_no_finite_norm(dtype: torch.dtype, bad: float) -> None:
    grad = torch.full((2000,), 1e20, dtype=dtype)
    grad[7] = bad
    for found in (_numbers.norms([grad])[0], _numbers.norm(grad)):
        assert found.isnan() if math.isnan(bad) else found.isinf()


@singly(per=["parameter", "rule"], at=["step", "backward"], size=[1e20, 1e30], dtype=DTYPES)
def test_clip_norm_cuts_it(dtype: torch.dtype, size: float, at: str, per: str) -> None:
    if (at, per) == ("backward", "rule"):
        return
    model = nn.Linear(50, 40).to(dtype)
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(
        model, rule(action="clip-norm", max_norm=1.0, at=at, per=per), optimizer=optimizer
    ) as session:
        (model(torch.ones(1, 50, dtype=dtype)).sum() * size).backward()
        optimizer.step()
    grads = [
        param.grad.double().flatten() for param in model.parameters() if param.grad is not None
    ]
    lengths = (
        [float(torch.cat(grads).norm())] if per == "rule" else [float(g.norm()) for g in grads]
    )
    assert lengths == pytest.approx([1.0] * len(lengths), rel=2e-2)
    assert kinds_of(session) == []


def test_a_sparse_vector_alone_has_a_norm() -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    assert _numbers.norms([grad]).tolist() == [5.0]
