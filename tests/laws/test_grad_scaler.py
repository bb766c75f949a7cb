"""Under a `GradScaler` a threshold still means true gradients, and an overflow still is the scaler's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import data, same
from ranks import Json
from small import attach, equal, fields_of, kinds_of, linears, rule_file, sgd, tanh_net, weights_of
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonWarning, NonFiniteGradientError

KINDS = ["SGD", "SGD fused", "AdamW", "AdamW fused"]


def make(kind: str = "SGD", lr: float = 0.1) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = tanh_net(4, 6, 2)
    name, *fused = kind.split()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, fused=bool(fused))
    return model, optimizer


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    *,
    steps: int = 4,
    parts: int = 1,
    unscale: bool = False,
) -> list[Tensor]:
    for number in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            loss = model(data(10 * number + part, 5, 4)).square().mean() * 3
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            continue
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


@pytest.mark.cell("GradScaler", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("GradScaler, fused optimizer", "backward", "accumulated", "step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["backward", "accumulated", "step"])
def test_records_and_captures_are_in_true_units(at: str, kind: str) -> None:
    found = []
    for scaler in (None, GradScaler("cpu", init_scale=4096.0)):
        model, optimizer = make(kind)
        log = {"action": "norm-log", "at": at, "stats": ["l2", "linf", "mean"]}
        kept = {"action": "capture", "at": at, "params": "0.weight"}
        file = rule_file(log, kept, params="*")
        of_module = {"modules": "0", "tensor": "output.grad"}
        file["rules"].append({"id": "module", "action": "norm-log", **of_module})
        with gradsurgeon.apply(model, file) as session:
            train(model, optimizer, scaler, steps=2)
        rows = [v for s in ("l2", "linf", "mean") for _, v in session.history("0.weight", s)]
        rows += [v for _, v in session.history("0", rule="module")]
        found.append([*rows, *(v.norm().item() for v in session.captured("r1").values())])
    assert len(found[0]) == 10
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_observing_under_a_scaler_changes_no_bit(kind: str) -> None:
    observing = rule_file(
        {"action": "norm-log"},
        {"action": "norm-log", "at": "backward"},
        {"action": "norm-log", "at": "step"},
        {"action": "nan-trap"},
        params="*",
    )
    ends = []
    for watch in (True, False):
        model, optimizer = make(kind)
        session = gradsurgeon.apply(model, observing) if watch else None
        ends.append(train(model, optimizer, GradScaler("cpu", init_scale=2.0**15)))
        if session is not None:
            session.remove()
    assert equal(*ends)


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_an_event_no_trap_and_counts_as_a_step(kind: str) -> None:
    model, optimizer = make(kind)
    scaler = GradScaler("cpu", init_scale=2.0**127)  # the largest that float32 holds: it overflows
    clamp = {"action": "clamp", "at": "backward", "min": -1.0, "max": 1.0}
    with gradsurgeon.apply(model, rule_file(clamp, {"action": "nan-trap"}, params="*")) as session:
        before = weights_of(model)
        train(model, optimizer, scaler, steps=1)
        # A clamp that hid the overflow would keep the scaler from backing off.
        assert scaler.get_scale() == 2.0**126
        assert same(before, weights_of(model))
        assert session.step == 1
        train(model, optimizer, scaler, steps=1)
        assert not torch.equal(before[0], model[0].weight)
        assert session.step == 2
        assert fields_of(session, "kind", "step") == [("scaler-skip", 0)]


@pytest.mark.parametrize("then", ["raise", "skip-step"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_a_nan_that_makes_the_scaler_skip_for_ever_is_a_trap(kind: str, then: str) -> None:
    model, optimizer = make(kind)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    trap = {"action": "nan-trap", "then": then, "give_up_after": 4}
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with gradsurgeon.apply(model, rule_file(trap, params="*")) as session:
        with pytest.warns(GradSurgeonWarning, match="the weight 0.weight was not finite"):
            train(model, optimizer, scaler, steps=1)
        train(model, optimizer, scaler, steps=2)
        with pytest.raises(
            NonFiniteGradientError, match=r"keeps skipping \(4 steps in a row\)"
        ) as e:
            train(model, optimizer, scaler, steps=1)
    assert (e.value.rule, e.value.step) == ("r0", 3)
    assert e.value.name == "2.bias"
    assert kinds_of(session).count("scaler-skip") == 4


def test_a_scale_below_one_is_a_trap_at_once() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=0.5)
    with gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*")):
        loss = model(data(0, 5, 4)).sum() * float("inf")
        scaler.scale(loss).backward()
        with pytest.raises(NonFiniteGradientError, match=r"its scale is below 1"):
            scaler.step(optimizer)


def test_a_trap_that_never_gives_up_warns_of_a_nan_and_stops_nothing() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=4.0)
    trap = {"action": "nan-trap", "then": "warn", "give_up_after": "never"}
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with gradsurgeon.apply(model, rule_file(trap, params="*")) as session:
        with pytest.warns(GradSurgeonWarning, match="no loss scale can mend"):
            train(model, optimizer, scaler, steps=1)
        with pytest.warns(GradSurgeonWarning, match="its scale is below 1") as told:
            train(model, optimizer, scaler, steps=5)
        skip, trip = "scaler-skip", "trap"
        first = [skip, "notice", skip, skip, skip]
        assert kinds_of(session) == first + [trip, skip] * 2 + [trip]
    assert len(told) == 1
    assert "\nthe GradScaler skips the update\n" in str(told[0].message)


class Masked(nn.Sequential):
    """Its forward is finite; the gradient of the square root is not where ``masked``."""

    masked = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return torch.where(y > 0, y, torch.sqrt(y - y)) if self.masked else y


def test_a_nan_that_no_loss_scale_can_mend_is_told_with_its_line() -> None:
    model = Masked(nn.Linear(4, 3))
    optimizer = sgd(model)
    scaler = GradScaler("cpu", init_scale=2.0**127)
    with gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*")) as session:
        train(model, optimizer, scaler, steps=1)
        assert kinds_of(session) == ["scaler-skip"], "an overflow"
        train(model, optimizer, scaler, steps=2)
        model.masked = True
        with pytest.warns(GradSurgeonWarning, match="no loss scale can mend") as told:
            train(model, optimizer, scaler, steps=3)
        kinds = kinds_of(session)
        assert kinds == ["scaler-skip"] * 2 + ["notice"] + ["scaler-skip"] * 2
        assert session.status()["r0"].fired == 2
    (text,) = (str(one.message) for one in told)
    assert "step 3, rule r0: the GradScaler skips a step that no loss scale can mend" in text
    assert "NaN born in the backward pass" in text
    assert "torch.sqrt(y - y)" in text
    assert "cause: mathematics" in text


@pytest.mark.parametrize("rows", [slice(None), slice(1)], ids=["every row", "one row"])
def test_nan_in_the_input_of_the_model_is_told_at_the_first_skip(rows: slice) -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=2.0**8)
    x = data(0, 5, 4)
    x[rows, 1] = float("nan")
    with gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*")) as session:
        scaler.scale(model(x).sum()).backward()
        with pytest.warns(GradSurgeonWarning, match="no loss scale can mend") as told:
            scaler.step(optimizer)
        assert kinds_of(session) == ["scaler-skip", "notice"]
    assert "the input of the root (Sequential) was not finite when" in str(told[0].message)


def test_an_infinity_in_every_output_may_be_meant() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=2.0**8)
    with gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*")) as session:
        scaler.scale((model(data(0, 5, 4)) * 0).log().sum()).backward()
        scaler.step(optimizer)
        assert kinds_of(session) == ["scaler-skip"]


@pytest.mark.filterwarnings("ignore:step 2, rule r0. the GradScaler skips")
def test_running_a_skipped_step_again_changes_nothing() -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Masked(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**127)
        session = (
            gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*"))
            if watched
            else None
        )
        for step in range(8):
            model.masked = step in (2, 3)
            train(model, optimizer, scaler, steps=1)
        if session is not None:
            assert "notice" in {event.kind for event in session.events}, "a step was run again"
            session.remove()
        ends.append([*model.state_dict().values(), torch.rand(3), torch.tensor(scaler.get_scale())])
    for plain, under_rules in zip(*ends, strict=True):
        assert torch.equal(plain, under_rules)


def test_a_scaler_that_skips_gradients_of_no_backward_pass_is_a_trap_as_well() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=0.5)
    with gradsurgeon.apply(model, rule_file({"action": "nan-trap"}, params="*")):
        for param in model.parameters():
            param.grad = torch.full_like(param, math.inf)
        scaler.scale(torch.ones(()))
        with pytest.raises(NonFiniteGradientError, match="not finite right before the update"):
            scaler.step(optimizer)


def steps_under_a_scaler(model: nn.Module, rule: Json, faults: list[str]) -> list[str]:
    """Take a step for each fault: "overflow" in all parameters, "other" in the last, "nan" by hand."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    first, *_, last = model.parameters()
    results = []
    with attach(model, rule, optimizer=optimizer):
        for fault in faults:
            optimizer.zero_grad()
            loss = scaler.scale(model(torch.ones(1, 2)).sum())
            (loss * math.inf if fault == "overflow" else loss).backward()
            assert first.grad is not None
            assert last.grad is not None
            if fault == "other":
                last.grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            if fault == "nan":  # for the trap to find: the scaler has looked
                first.grad.fill_(math.nan)
            try:
                scaler.step(optimizer)
                results.append("went on")
            except NonFiniteGradientError as error:
                results.append(str(error))
            scaler.update()
    return results


def test_a_trap_that_has_given_up_because_of_a_scaler_has_no_patience_left() -> None:
    rule = {"id": "t", "action": "nan-trap", "params": "*", "then": "skip-step", "give_up_after": 3}
    faults = ["overflow"] * 4 + ["nan", "none", "nan"]
    results = steps_under_a_scaler(nn.Linear(2, 1), rule, faults)
    assert [text == "went on" for text in results] == [True, True, False, False, False, True, True]
    assert "keeps skipping (3 steps in a row)" in results[2]
    for place, times in ((2, 3), (3, 4), (4, 5)):
        assert f"tripped {times} times in a row" in results[place]


def test_a_scaler_that_skips_for_other_parameters_leaves_the_row_of_a_trap_alone() -> None:
    model = linears(2, 2, 1)
    rule = {"id": "t", "action": "nan-trap", "params": "0.*", "then": "skip-step"}
    faults = ["nan", "other", "other", "nan"]
    results = steps_under_a_scaler(model, {**rule, "give_up_after": 2}, faults)
    assert results[:3] == ["went on"] * 3
    assert "tripped 2 times in a row" in results[3]


@pytest.mark.cell("GradScaler", "backward", refused="`sanitize`: the scaler must see its overflow")
def test_sanitize_is_refused_where_a_scaler_must_see_its_overflow() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu")
    sanitize = rule_file({"action": "sanitize"}, params="*")
    with pytest.raises(BindError, match=r"rule r0: an enabled GradScaler must see its overflow"):
        gradsurgeon.apply(model, sanitize, scaler=scaler)
    assert model[0].weight._backward_hooks is None
    with gradsurgeon.apply(model, sanitize), pytest.raises(BindError, match="rule r0: "):
        train(model, optimizer, scaler, steps=1)
    with gradsurgeon.apply(model, sanitize, scaler=GradScaler("cpu", enabled=False)):
        train(model, optimizer, None, steps=1)


def test_the_class_of_the_scaler_is_as_before_once_the_rules_are_off() -> None:
    before = (GradScaler.scale, GradScaler.step)
    model, _ = make()
    session = gradsurgeon.apply(model, rule_file({"action": "norm-log"}, params="*"))
    assert before != (GradScaler.scale, GradScaler.step)
    session.remove()
    assert before == (GradScaler.scale, GradScaler.step)


def norm_of(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]


@pytest.mark.parametrize("beside", [{"action": "norm-log"}, {"action": "nan-trap"}])
@pytest.mark.parametrize("foreign", [False, True], ids=["alone", "beside a scaled model"])
def test_the_scaler_of_another_model_is_none_of_its_business(
    foreign: bool,
    beside: Json,
) -> None:
    other, other_optimizer = make()
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=1024.0)
    bounds = (
        {"action": "clamp", "at": "backward", "min": -0.05, "max": 0.05},
        {"action": "clip-norm", "per": "rule", "max_norm": 0.01, "at": "step"},
    )
    with gradsurgeon.apply(
        model, rule_file(*bounds, beside, params="*"), optimizer=optimizer
    ) as session:
        if foreign:
            scaler.scale(other(data(0, 5, 4)).square().mean()).backward()
            scaler.step(other_optimizer)
            scaler.update()
        (model(data(0, 5, 4)).square().mean() * 3).backward()
        assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(0.05)
        seen = norm_of(model)
        optimizer.step()
        assert norm_of(model) == pytest.approx(0.01, rel=1e-4)
        if beside["action"] == "norm-log":
            recorded = [session.latest(name) for name, _ in model.named_parameters()]
            assert torch.tensor(recorded).norm() == pytest.approx(seen)


def test_each_pass_is_taken_for_itself() -> None:
    torch.manual_seed(4)
    parts = {"plain": 0.0, "small": 16.0, "large": 1024.0}
    net: Any = nn.ModuleDict({name: nn.Linear(4, 3) for name in parts})
    optimizers = {name: sgd(net[name]) for name in parts}
    scalers = {name: GradScaler("cpu", init_scale=scale) for name, scale in parts.items() if scale}
    bound = {"action": "clip-norm", "per": "rule", "max_norm": 0.05, "at": "step"}
    log = [{"action": "norm-log"}, {"action": "norm-log", "at": "step"}]
    clips = [bound | {"params": f"{name}.*"} for name in parts]
    with gradsurgeon.apply(net, rule_file(*log, *clips, params="*")) as session:
        # All losses are scaled before the first of them is used.
        losses = {name: net[name](data(1, 5, 4)).square().mean() for name in parts}
        truth = {
            name: torch.autograd.grad(loss, net[name].weight, retain_graph=True)[0].norm()
            for name, loss in losses.items()
        }
        scaled = {
            name: scalers[name].scale(loss) if name in scalers else loss
            for name, loss in losses.items()
        }
        for loss in scaled.values():
            loss.backward()
        for name, optimizer in optimizers.items():
            if name in scalers:
                scalers[name].step(optimizer)
            else:
                optimizer.step()
            assert norm_of(net[name]) == pytest.approx(0.05, rel=1e-4)
            for rule in ("r0", "r1"):
                found = session.latest(f"{name}.weight", rule=rule)
                assert found == pytest.approx(float(truth[name]), rel=1e-5)


def test_a_pass_that_raised_leaves_no_scale_behind() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=1024.0)

    def fail(_grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    with gradsurgeon.apply(model, rule_file({"action": "norm-log"}, params="*")) as session:
        out = model(data(0, 5, 4))
        out.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            scaler.scale(out.square().mean()).backward()
        loss = model(data(0, 5, 4)).square().mean()
        truth = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0].norm()
        loss.backward()
        optimizer.step()
        assert session.latest("0.weight") == pytest.approx(float(truth), rel=1e-5)


def test_the_passes_inside_a_scaled_one_carry_its_scale() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=1024.0)
    with gradsurgeon.apply(model, rule_file({"action": "norm-log"}, params="*")) as session:
        x = data(0, 5, 4).requires_grad_()
        truth = torch.autograd.grad(model(x).square().mean(), model[0].weight)[0].norm()
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            out = checkpoint(model, x, use_reentrant=True)
            scaler.scale(out.square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        history = [value for _, value in session.history("0.weight")]
        assert math.isnan(history[0])
        assert history[1:] == [pytest.approx(float(truth), rel=1e-5)]


class Doubling(torch.amp.GradScaler):
    """Scales and steps in its own ways, as `ShardedGradScaler` does."""

    def scale(self, outputs: Any) -> Any:
        assert self._enabled
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


def test_scalers_that_scale_in_their_own_way_are_followed() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = sgd(model)
    entries = [
        {"id": at, "action": "norm-log", "params": "*", "at": at}
        for at in ("backward", "accumulated", "step")
    ]
    with attach(model, *entries) as session:
        scaler: Any = Doubling("cpu", init_scale=1024.0)
        for fault in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * fault).backward()
            scaler.step(optimizer)
            scaler.update()
        for at in ("backward", "accumulated", "step"):
            assert session.latest("weight", rule=at) == pytest.approx(2**0.5)
        assert session.step == 3
        assert kinds_of(session) == ["scaler-skip"]
    assert "__wrapped__" not in vars(vars(Doubling)["scale"])


def test_a_wrapper_that_came_later_stays_when_the_rules_go() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    original = torch.amp.GradScaler.step
    calls = []
    session = attach(
        model,
        {"id": "z", "action": "zero", "params": "*", "at": "step"},
    )
    ours = torch.amp.GradScaler.step

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    torch.amp.GradScaler.step = theirs  # type: ignore[method-assign]
    try:
        session.remove()
        assert torch.amp.GradScaler.step is theirs
        before = model.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        assert calls == [scaler]
        assert not torch.equal(before, model.weight)
    finally:
        torch.amp.GradScaler.step = original  # type: ignore[method-assign]
