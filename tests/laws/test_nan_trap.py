"""The NaN trap: right name, right number, and an update that really does not happen."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import CASES, data, memory, same
from ranks import Json
from small import attach, events_of, fields_of, kinds_of, sgd, take_step
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses

from gradsurgeon import GradSurgeonWarning, NonFiniteGradientError
from gradsurgeon.tensors import _torch


class Poison(torch.autograd.Function):
    """Hands its input through, and puts one bad element into the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float | None) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        if ctx.value is not None:
            grad = grad.clone()
            grad[0, 0] = ctx.value
        return grad, None


class Net(nn.Module):
    """Three layers; the fault sits between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 2)
        self.fault: float | None = None

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(Poison.apply(h, self.fault))


NAN = float("nan")
INF = float("inf")
ORDER = ["third.bias", "third.weight", "second.bias", "second.weight", "first.bias", "first.weight"]


def trap(**options: Any) -> Json:
    return {"id": "trap", "action": "nan-trap", "params": "*", **options}


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def step(
    model: Net,
    optimizer: torch.optim.Optimizer,
    number: int,
    fault: float | None = None,
    clip: float = INF,
) -> None:
    model.fault = fault
    optimizer.zero_grad()
    F.mse_loss(model(data(number, 5, 4)), torch.ones(5, 2)).backward()
    if clip != INF:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@pytest.fixture(params=["reads are free", "reads cost a wait"])
def _both_kinds_of_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # On an accelerator the trap does not look at numbers until the step; the same code runs here.
    if request.param == "reads cost a wait":
        monkeypatch.setattr(_torch, "is_host", lambda _: False)


@pytest.mark.usefixtures("_both_kinds_of_device")
@pytest.mark.parametrize("clip", [INF, 1.0], ids=["as it is", "clipped by the script"])
@pytest.mark.parametrize(("fault", "word"), [(NAN, "NaN"), (INF, "Inf"), (-INF, "Inf")])
def test_the_border_is_where_the_fault_is(fault: float, word: str, clip: float) -> None:
    model, optimizer = make()
    with attach(model, trap()) as session:
        for number in range(3):
            step(model, optimizer, number, clip=clip)
        before = memory(model, optimizer)
        with pytest.raises(NonFiniteGradientError) as caught:
            step(model, optimizer, 3, fault, clip)
    error = caught.value
    told = (error.rule, error.step, error.rank, error.name, error.bundle)
    assert told == ("trap", 3, 0, "second.bias", None)
    assert same(before, memory(model, optimizer))
    lines = str(error).splitlines()
    assert lines[0] == "step 3, rule trap: 4 of 6 gradients are not finite after backward"
    assert lines[1] == "stopped before the update: no weight was moved"
    start = lines.index("in the order in which backward produced them:") + 1
    table = [line.split() for line in lines[start : start + 6]]
    assert [row[1] if row[0] == "finite" else row[2] for row in table] == ORDER
    assert [row[0] for row in table] == ["finite", "finite", ">", ">", ">", ">"]
    # One element of the batch is poisoned: one column of `second.bias`, one row of `second.weight`.
    expected = [word, "second.bias", "1"]
    if clip != INF:  # which wrote to the gradients: what it has left is not counted
        expected.pop()
    assert table[2][1:4] == expected
    assert lines[start + 6] == (
        "the border lies between third.weight (still finite) and second.bias (first that is not)"
    )
    assert fields_of(session, "kind", "name", "step") == [("trap", "second.bias", 3)]


def test_warn_warns_and_lets_the_update_happen() -> None:
    model, optimizer = make()
    with attach(model, trap(then="warn")) as session:
        with pytest.warns(GradSurgeonWarning, match=r"^step 0, rule trap: 4 of 6 gradients"):
            step(model, optimizer, 0, NAN)
        assert session.step == 1
    assert model.second.weight.isnan().any()
    assert len(session.status()["trap"].warnings) == 1


def test_giving_up_after_so_many_trips_in_a_row() -> None:
    model, optimizer = make()
    with attach(model, trap(then="skip-step", give_up_after=3)) as session:
        for fault in (NAN, NAN, None, NAN, NAN):
            step(model, optimizer, 0, fault)
        with pytest.raises(NonFiniteGradientError, match="giving up: tripped 3 times in a row"):
            step(model, optimizer, 0, NAN)
        assert session.step == 6
        assert kinds_of(session).count("skipped-step") == 4


@pytest.mark.usefixtures("_both_kinds_of_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_finite_gradients_are_no_alarm(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False).to(dtype)
    optimizer = sgd(model, 0.0)
    with attach(model, trap()) as session:
        (model.weight * 1e38).sum().backward()
        optimizer.step()
    assert session.events == []
    assert session.status()["trap"].fired == 1


def test_float16_near_its_limit_is_no_alarm_and_beyond_is_one() -> None:
    model = nn.Linear(40, 40, bias=False).to(torch.float16)
    optimizer = sgd(model, 0.0)
    with attach(model, trap()):
        (model.weight * 6e4).sum().backward()
        optimizer.step()
        with pytest.raises(NonFiniteGradientError, match=r"> Inf +weight +1,600 elements"):
            (model.weight * 6e4).sum().backward()
            optimizer.step()


@pytest.mark.usefixtures("_both_kinds_of_device")
@pytest.mark.parametrize("fault", [NAN, INF])
def test_a_gradient_that_the_script_repairs_is_a_notice(fault: float) -> None:
    model, optimizer = make()
    params: list[Any] = [*model.parameters()]
    with attach(model, trap()) as session:
        model.fault = fault
        model(data(0, 5, 4)).sum().backward()
        for param in params:
            param.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    assert fields_of(session, "kind", "step", "name") == [("notice", 0, "first.weight")]
    assert session.events[0].message.startswith(
        "4 gradients were non-finite after backward and finite at the update "
        "(first.weight, first.bias, second.weight and 1 more)"
    )


def test_a_gradient_that_the_script_breaks_after_backward() -> None:
    model, optimizer = make()
    weight: Any = model.first.weight
    with attach(model, trap()) as session:
        model(data(0, 5, 4)).sum().backward()
        weight.grad[1, 1] = INF
        with pytest.raises(
            NonFiniteGradientError, match="finite after backward: something in between"
        ):
            optimizer.step()
    assert session.events[0].name == "first.weight"


@pytest.mark.parametrize("trap_first", [True, False])
def test_a_rule_of_ours_that_would_repair_is_no_reason_to_go_on(trap_first: bool) -> None:
    model, optimizer = make()
    rules = [
        trap(),
        {"id": "zero", "action": "zero", "params": ["first.*", "second.*"], "at": "step"},
        {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -1, "max": 1},
    ]
    if not trap_first:
        rules.reverse()
    before = memory(model, optimizer)
    bias: Any = model.second.bias
    with attach(model, *rules) as session:
        with pytest.raises(NonFiniteGradientError, match="4 of 6 gradients are not finite"):
            step(model, optimizer, 0, INF)
        # What the script handed over is what whoever debugs it finds.
        assert bias.grad.isinf().any()
        assert session.status()["bound"].fired == 0
    assert fields_of(session, "kind", rule="trap") == ["trap"]
    assert same(before, memory(model, optimizer))


def test_the_micro_batch_is_named() -> None:
    model, optimizer = make()
    with attach(model, trap()) as session:
        for _ in range(2):
            optimizer.zero_grad()
            for part in range(4):
                model.fault = NAN if session.step == 1 and part == 2 else None
                model(data(part, 5, 4)).sum().backward()
            if session.step == 0:
                optimizer.step()
        with pytest.raises(NonFiniteGradientError, match="micro-batch 3 of 4"):
            optimizer.step()


def test_observe_mode_reports_and_does_nothing() -> None:
    model, optimizer = make()
    with attach(model, trap(), mode="observe") as session:
        step(model, optimizer, 0, NAN)
    assert model.second.weight.isnan().any()
    assert kinds_of(session) == ["trap"]
    assert "observing only: `then: raise` would have acted" in session.events[0].message


def test_a_loss_that_is_nan_points_at_the_loss() -> None:
    model, optimizer = make()
    with attach(model, trap()), pytest.raises(NonFiniteGradientError) as caught:
        take_step(optimizer, (model(data(0, 5, 4)) * NAN).sum())
    assert caught.value.name == "third.bias"
    assert "the loss was given NaN: the second input of MulBackward0" in str(caught.value)
    again = copy.copy(caught.value)  # as pickling does
    told = (again.rule, again.step, again.name, str(again))
    assert told == ("trap", 0, "third.bias", str(caught.value))


def test_a_sparse_gradient_is_watched() -> None:
    case = CASES["sparse"]
    model = case.make()
    optimizer = case.optimizer(model)
    with attach(model, trap()), pytest.raises(NonFiniteGradientError) as caught:
        out = model.emb(torch.tensor([1, 1, 3]))
        take_step(optimizer, (out * torch.tensor([1.0, 1.0, NAN, 1.0])).sum())
    assert caught.value.name == "emb.weight"
    # Rows 1 and 3: one bad element each, the duplicate is an addend.
    assert "> NaN  emb.weight  2 elements" in str(caught.value)


def test_what_rules_of_ours_spoil_again_and_again_is_given_up() -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model)
    huge = {"action": "scale", "params": "*", "factor": 3e38, "at": "step"}
    rules = [huge, {**huge, "params": "bias"}, trap(then="skip-step", give_up_after=3)]
    with attach(model, *rules) as session:
        for number in range(2):
            take_step(optimizer, model(data(number, 5, 4)).square().mean())
        with pytest.raises(NonFiniteGradientError, match="tripped 3 times in a row"):
            take_step(optimizer, model(data(2, 5, 4)).square().mean())
    for event in events_of(session, "trap"):
        assert event.name == "bias"
        assert "1 of 2 gradients are not finite right before the update" in event.message


# --- several traps in one update ------------------------------------------------------------------

SPIKES: Json = {
    "id": "spikes",
    "action": "spike-trap",
    "params": "*",
    "above": {"sigmas": 4},
    "then": "warn",
}


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("then", ["warn", "skip-step", "raise"])
def test_a_trap_that_warns_knows_whether_another_one_holds_the_update_back(then: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.01)
    with attach(model, SPIKES, trap(then=then, forensics=False)) as session:
        for number in range(39):
            take_step(optimizer, model(data(number, 8, 4)).square().mean())
        with pytest.raises(NonFiniteGradientError) if then == "raise" else nullcontext():
            take_step(optimizer, model(data(39, 8, 4)).square().mean() * NAN)
    texts = dict(fields_of(session, "kind", "message", step=39))
    assert "the norm is NaN" in texts["spike"]
    assert ("goes on" in texts["spike"]) == (then == "warn")
    for text in texts.values():
        assert ("the update goes on" in text) == (then == "warn")
    assert ("another rule holds this update back" in texts["spike"]) == (then != "warn")


def test_a_stopped_update_does_not_count_as_skipped() -> None:
    model, optimizer = make()
    skips = trap(then="skip-step", params="*.weight")
    stops = {**trap(params="*.bias"), "id": "stops"}
    with attach(model, skips, stops) as session, pytest.raises(NonFiniteGradientError):
        step(model, optimizer, 0, NAN)
    assert fields_of(session, "kind", "rule") == [("trap", "trap"), ("trap", "stops")]
    assert "step skipped" not in session.events[0].message
