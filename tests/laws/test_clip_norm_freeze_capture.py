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
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import BindError, NonFiniteGradientError
from gradsurgeon.tensors import _numbers


def rules(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "rules": [{"id": f"r{i}", "params": "*", **e} for i, e in enumerate(entries)],
    }


def make() -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0
) -> None:
    optimizer.zero_grad()
    (model(data(number, 5, 4)).square().mean() * scale).backward()
    optimizer.step()


# --- freeze ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_a_frozen_parameter_is_not_touched_and_thaws_by_schedule(kind: str) -> None:
    model = make()
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    if kind == "SGD":
        options["momentum"] = 0.9
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    freeze = {"action": "freeze", "params": "0.*", "steps": {"from": 2, "to": 5}}
    with gradsurgeon.apply(model, rules(freeze, {"action": "norm-log"})) as session:
        for number in range(7):
            before = [p.detach().clone() for p in model[0].parameters()]
            held = {k: v.clone() for k, v in optimizer.state[model[0].weight].items()}
            step(model, optimizer, number)
            frozen = all(
                torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True)
            )
            assert frozen == (2 <= number < 5)
            if frozen:
                after = optimizer.state[model[0].weight]
                assert all(torch.equal(after[k], v) for k, v in held.items())
                # The gradient is there again for whoever looks after the step.
                assert model[0].weight.grad is not None
        assert len(session.history("0.weight")) == 7
    assert (session.status()["r0"].fired, session.status()["r0"].changed) == (6, 1.0)


def test_frozen_from_the_start_leaves_no_state_and_zero_does_not_freeze() -> None:
    moved = {}
    for action in ("freeze", "zero"):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = model[0].weight.detach().clone()
        entry = {"action": action, "params": "0.*", "at": "step"}
        with gradsurgeon.apply(model, rules(entry)):
            for number in range(3):
                step(model, optimizer, number)
        moved[action] = not torch.equal(before, model[0].weight)
        assert (model[0].weight in optimizer.state) == (action == "zero")
    assert moved == {"freeze": False, "zero": True}


def test_a_frozen_parameter_equals_one_that_the_optimizer_does_not_have() -> None:
    frozen, without = make(), make()
    one = torch.optim.AdamW(frozen.parameters(), lr=0.1)
    other = torch.optim.AdamW(without[2].parameters(), lr=0.1)
    with gradsurgeon.apply(frozen, rules({"action": "freeze", "params": "0.*"})):
        for number in range(4):
            step(frozen, one, number)
    for number in range(4):
        without.zero_grad()
        step(without, other, number)
    assert all(
        torch.equal(a, b) for a, b in zip(frozen.parameters(), without.parameters(), strict=True)
    )


def test_a_trap_still_sees_a_frozen_gradient_and_a_closure_works() -> None:
    model = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(data(0, 5, 4)).square().mean()
        loss.backward()
        return loss

    freeze = {"action": "freeze", "params": "0.*"}
    with gradsurgeon.apply(model, rules(freeze, {"action": "nan-trap"})):
        optimizer.step(closure)
        assert torch.equal(before, model[0].weight)
        with pytest.raises(NonFiniteGradientError):
            step(model, optimizer, 0, scale=float("nan"))


def test_lbfgs_and_hand_written_updates_are_refused() -> None:
    model = make()
    freeze = rules({"action": "freeze", "params": "0.*"})
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


def clipped_by_hand(
    name: str, max_norm: float, norm_type: float, *, per_rule: bool
) -> list[Tensor]:
    case = CASES[name]
    model = case.make()
    case.backward(model, 0)
    params = [p for p in model.parameters() if p.grad is not None]
    groups = [params] if per_rule else [[p] for p in params if p.grad.numel() or norm_type == 2]
    for group in groups:
        torch.nn.utils.clip_grad_norm_(group, max_norm, norm_type)
    return [p.grad for p in params]


NAMES = [name for name, case in CASES.items() if not case.sparse and not case.half]


@singly(name=NAMES, norm_type=[2, "inf"], at=["step", "backward"], max_norm=[0.05, 1e3])
def test_clip_per_parameter_equals_clip_grad_norm(
    name: str, norm_type: Any, at: str, max_norm: float
) -> None:
    case = CASES[name]
    if case.twice:
        at = "step"  # at `backward` it bounds each of the two passes, which is another thing
    model = case.make()
    entry = {"action": "clip-norm", "max_norm": max_norm, "norm_type": norm_type, "at": at}
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, rules(entry), optimizer=optimizer):
        case.backward(model, 0)
        optimizer.step()
    wanted = clipped_by_hand(name, max_norm, float(norm_type), per_rule=False)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


@singly(name=NAMES, norm_type=[2], max_norm=[0.05, 1e3])
def test_clip_per_rule_equals_clip_grad_norm(name: str, norm_type: float, max_norm: float) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = case.optimizer(model)
    entry = {"action": "clip-norm", "max_norm": max_norm, "norm_type": norm_type, "per": "rule"}
    with gradsurgeon.apply(model, rules(entry), optimizer=optimizer) as session:
        case.backward(model, 0)
        optimizer.step()
    wanted = clipped_by_hand(name, max_norm, norm_type, per_rule=True)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)
    assert session.status()["r0"].changed == (1.0 if max_norm == 0.05 else 0.0)


def python_calls(count: int) -> int:
    """Return how many functions of gradsurgeon an update calls that records, judges and shortens gradients."""
    model = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = {"action": "clip-norm", "per": "rule", "max_norm": 1e-3}
    seen: list[str] = []
    numbers: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_filename)

    wanted = rules({"action": "norm-log"}, {"action": "nan-trap"}, clip)
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


def test_one_norm_is_taken_per_optimizer() -> None:
    model = make()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.0) for i in (0, 2)]
    entry = {"action": "clip-norm", "max_norm": 0.1, "per": "rule"}
    with gradsurgeon.apply(model, rules(entry), optimizer=optimizers):
        model(data(0, 5, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for i in (0, 2):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model[i].parameters()])
        assert norm.item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("per", ["parameter", "rule"])
def test_a_norm_that_is_not_finite_leaves_the_gradients_alone_and_is_an_event(per: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    entry = {"action": "clip-norm", "max_norm": 0.1, "per": per, "params": "2.*"}
    with gradsurgeon.apply(model, rules(entry)) as session:
        model(data(0, 5, 4)).sum().backward()
        model[2].bias.grad[0] = float("inf")
        before = [p.grad.clone() for p in model[2].parameters()]
        optimizer.step()
    assert torch.equal(model[2].bias.grad, before[1])
    assert torch.equal(model[2].weight.grad, before[0]) == (per == "rule")
    (event,) = session.events
    assert (event.kind, event.rule, event.step) == ("notice", "r0", 0)
    assert event.message == "the norm is not finite: the gradients were left alone"


def test_half_precision_is_measured_in_float32() -> None:
    model = nn.Linear(100, 10, bias=False).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(model, rules({"action": "clip-norm", "max_norm": 1000.0})):
        (model.weight * 5e4).sum().backward()  # a norm of 1.6 M, beyond float16
        optimizer.step()
    assert model.weight.grad is not None
    assert model.weight.grad.float().norm().item() == pytest.approx(1000.0, rel=1e-3)


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
    with gradsurgeon.apply(model, {"version": 1, "rules": [entry, kept]}) as session:
        model(data(0, 5, 4)).square().sum().backward()
    (grad,) = session.captured("k").values()
    assert grad.norm().item() == pytest.approx(0.01, rel=1e-3)


# --- sanitize and capture -------------------------------------------------------------------------


def test_sanitize_repairs_one_pass_and_the_trap_stays_quiet() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsurgeon.apply(model, rules({"action": "sanitize"}, {"action": "nan-trap"})) as session:
        good = model(data(0, 5, 4)).square().mean()
        good.backward()
        kept = [p.grad.clone() for p in model.parameters()]
        (model(data(1, 5, 4)) * float("nan")).sum().backward()
        assert all(torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept, strict=True))
        optimizer.step()
    assert session.events == []


@pytest.mark.parametrize("at", ["backward", "accumulated", "step"])
def test_captured_gradients_at_every_point(at: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entry = {"action": "capture", "params": "2.bias", "at": at}
    with gradsurgeon.apply(model, rules(entry)) as session:
        seen = []
        for number in range(2):
            model(data(number, 5, 4)).sum().backward()
            seen.append(model[2].bias.grad.clone())
        optimizer.step()
    kept = session.captured("r0")
    if at == "step":
        assert list(kept) == [("2.bias", 0, 0)]
        assert torch.equal(kept["2.bias", 0, 0], seen[1])
    else:
        assert list(kept) == [("2.bias", 0, 0), ("2.bias", 0, 1)]
        second = seen[1] if at == "accumulated" else seen[1] - seen[0]
        assert torch.equal(kept["2.bias", 0, 0], seen[0])
        assert torch.allclose(kept["2.bias", 0, 1], second)
    with pytest.raises(KeyError, match="no capture rule 'r1'; there are: r0"):
        session.captured("r1")


# -------------------------------------------------------------------------------------------------
# A gradient whose elements are finite has its norm, though their squares overflow or vanish, and is cut.
# -------------------------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.bfloat16]
# Measured together with others, alone, and by a dot product.
SIZES = [4, 2000, 2**18]


def rule(**options: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"id": "r", "params": "*", **options}]}


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


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [4, 3000])
def test_a_small_gradient_is_recorded_whatever_it_is_measured_beside(
    beside: int, dtype: torch.dtype, passes: int
) -> None:
    model = nn.ParameterList([torch.zeros(4, dtype=dtype), torch.zeros(beside)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    points = ("backward", "accumulated", "step")
    logs = [{"id": at, "action": "norm-log", "params": "*", "at": at} for at in points]
    with gradsurgeon.apply(model, {"version": 1, "rules": logs}, optimizer=optimizer) as session:
        for _ in range(passes):
            torch.stack([(one * 1e-30).float().sum() for one in model]).sum().backward()
        optimizer.step()
        for at in points:
            expected = [2e-30] * passes if at == "backward" else [2e-30 * passes]
            found = [value for _, value in session.history("0", rule=at)]
            assert found == pytest.approx(expected, rel=1e-2, abs=0), at


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
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
    assert [event.kind for event in session.events] == []


@pytest.mark.parametrize("per", ["parameter", "rule"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spike_of_finite_elements_is_cut(dtype: torch.dtype, per: str) -> None:
    model = nn.Linear(50, 40, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    above = {"sigmas": 2.5, "warmup": 10}
    with gradsurgeon.apply(
        model, rule(action="spike-trap", above=above, per=per), optimizer=optimizer
    ) as session:
        grad = Tensor()
        for step in range(31):
            grad = torch.randn(40, 50).to(dtype)
            model.weight.grad = grad.mul_(1e20) if step == 30 else grad
            optimizer.step()
    assert float(grad.double().norm()) < 100
    assert [event.kind for event in session.events if event.step == 30] == ["spike"]


def test_a_sparse_vector_alone_has_a_norm() -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    assert _numbers.norms([grad]).tolist() == [5.0]
