"""Under a `GradScaler` a threshold still means true gradients, and an overflow still is the scaler's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import data, same
from ranks import Json
from small import attach, equal, fields_of, kinds_of, linears, sgd, take_step, tanh_net, weights_of
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from gradsurgeon import BindError, GradSurgeonWarning, NonFiniteGradientError
from gradsurgeon.report.ending import tally_of

KINDS = ["SGD", "SGD fused", "AdamW", "AdamW fused"]


def make(kind: str = "SGD", lr: float = 0.1) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = tanh_net(4, 6, 2)
    name, *fused = kind.split()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, fused=bool(fused))
    return model, optimizer


TRAP: Json = {"id": "r0", "action": "nan-trap", "params": "*"}
LOG: Json = {"action": "norm-log", "params": "*"}


def cpu_scaler(scale: float) -> GradScaler:
    return GradScaler("cpu", init_scale=scale)


def scaled_step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    loss: Tensor = model(data(number, 5, 4)).square().mean() * 3
    return loss


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    *,
    steps: int = 4,
) -> list[Tensor]:
    scaler = scaler or GradScaler("cpu", enabled=False)
    for number in range(steps):
        scaled_step(scaler, optimizer, loss_of(model, number))
    return weights_of(model)


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_an_event_no_trap_and_counts_as_a_step(kind: str) -> None:
    model, optimizer = make(kind)
    scaler = cpu_scaler(2.0**127)  # the largest that float32 holds: it overflows
    clamp = {"id": "c", "action": "clamp", "params": "*", "at": "backward", "min": -1.0, "max": 1.0}
    with attach(model, clamp, TRAP) as session:
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
    scaler = cpu_scaler(2.0**16)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with attach(model, {**TRAP, "then": then, "give_up_after": 4}) as session:
        with pytest.warns(GradSurgeonWarning, match="the weight 0.weight was not finite"):
            train(model, optimizer, scaler, steps=1)
        train(model, optimizer, scaler, steps=2)
        with pytest.raises(
            NonFiniteGradientError, match=r"keeps skipping \(4 steps in a row\)"
        ) as e:
            train(model, optimizer, scaler, steps=1)
    assert (e.value.rule, e.value.step, e.value.name) == ("r0", 3, "2.bias")
    assert kinds_of(session).count("scaler-skip") == 4


def test_a_trap_that_never_gives_up_warns_of_a_nan_and_stops_nothing() -> None:
    model, optimizer = make()
    scaler = cpu_scaler(4.0)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with attach(model, {**TRAP, "then": "warn", "give_up_after": "never"}) as session:
        with pytest.warns(GradSurgeonWarning, match="no loss scale can mend"):
            train(model, optimizer, scaler, steps=1)
        with pytest.warns(GradSurgeonWarning, match="its scale is below 1") as told:
            train(model, optimizer, scaler, steps=5)
        skip = "scaler-skip"
        trip = "trap"
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
    scaler = cpu_scaler(2.0**127)
    with attach(model, TRAP) as session:
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
    x = data(0, 5, 4)
    x[rows, 1] = float("nan")
    with attach(model, TRAP) as session:
        with pytest.warns(GradSurgeonWarning, match="no loss scale can mend") as told:
            scaled_step(cpu_scaler(2.0**8), optimizer, model(x).sum())
        assert kinds_of(session) == ["scaler-skip", "notice"]
    assert "the input of the root (Sequential) was not finite when" in str(told[0].message)
    (finding,) = tally_of(session.events).findings
    assert finding.startswith("step 0: the input of the root (Sequential) was not finite")


def test_an_infinity_in_every_output_may_be_meant() -> None:
    model, optimizer = make()
    with attach(model, TRAP) as session:
        scaled_step(cpu_scaler(2.0**8), optimizer, (model(data(0, 5, 4)) * 0).log().sum())
        assert kinds_of(session) == ["scaler-skip"]


@pytest.mark.parametrize(
    ("loss", "node", "born"),
    [
        (lambda x: (x * 0).square().sum(1).sqrt(), "SqrtBackward0", "Inf born in the backward"),
        (lambda x: x * 0 / (x * 0), "DivBackward0", "NaN born in the forward"),
    ],
)
def test_a_fault_outside_of_the_model_is_told_at_the_first_skip_with_its_line(
    loss: Callable[[Tensor], Tensor], node: str, born: str
) -> None:
    model, optimizer = make()
    scaler = cpu_scaler(2.0**8)
    with attach(model, {**TRAP, "then": "warn"}) as session:
        with pytest.warns(GradSurgeonWarning):
            for step in range(3):
                scaled_step(scaler, optimizer, loss(model(data(step, 5, 4))).sum())
        assert kinds_of(session) == ["scaler-skip", "notice", "notice", *["scaler-skip"] * 2]
        told, line = (event.message for event in session.events if event.kind == "notice")
    assert f"{born} pass outside of the model: aten." in told
    assert f"the line of {node}: {__file__}:" in line


@pytest.mark.filterwarnings("ignore:step 2, rule r0. the GradScaler skips")
def test_running_a_skipped_step_again_changes_nothing() -> None:
    ends = []
    for rule in (LOG, TRAP):
        torch.manual_seed(0)
        model = Masked(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = cpu_scaler(2.0**127)
        with attach(model, rule) as session:
            for step in range(8):
                model.masked = step in (2, 3)
                train(model, optimizer, scaler, steps=1)
        # A step was run again.
        assert ("notice" in kinds_of(session)) == (rule is TRAP)
        ends.append([*model.state_dict().values(), torch.rand(3), torch.tensor(scaler.get_scale())])
    assert equal(*ends)


def test_a_scaler_that_skips_gradients_of_no_backward_pass_is_a_trap_as_well() -> None:
    model, optimizer = make()
    scaler = cpu_scaler(0.5)
    with attach(model, TRAP):
        for param in model.parameters():
            param.grad = torch.full_like(param, math.inf)
        scaler.scale(torch.ones(()))
        with pytest.raises(NonFiniteGradientError, match="not finite right before the update"):
            scaler.step(optimizer)


def steps_under_a_scaler(model: nn.Module, rule: Json, faults: list[str]) -> list[str]:
    """Take a step for each fault: "overflow" in all parameters, "other" in the last, "nan" by hand."""
    optimizer = sgd(model)
    scaler = cpu_scaler(2.0**14)
    params: list[Any] = [*model.parameters()]
    results = []
    with attach(model, rule, optimizer=optimizer):
        for fault in faults:
            optimizer.zero_grad()
            loss = scaler.scale(model(torch.ones(1, 2)).sum())
            (loss * math.inf if fault == "overflow" else loss).backward()
            if fault == "other":
                params[-1].grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            if fault == "nan":  # for the trap to find: the scaler has looked
                params[0].grad.fill_(math.nan)
            try:
                scaler.step(optimizer)
                results.append("went on")
            except NonFiniteGradientError as error:
                results.append(str(error))
            scaler.update()
    return results


def test_a_trap_that_has_given_up_because_of_a_scaler_has_no_patience_left() -> None:
    rule = {**TRAP, "then": "skip-step", "give_up_after": 3}
    faults = ["overflow"] * 4 + ["nan", "none", "nan"]
    results = steps_under_a_scaler(nn.Linear(2, 1), rule, faults)
    assert [text == "went on" for text in results] == [True, True, False, False, False, True, True]
    assert "keeps skipping (3 steps in a row)" in results[2]
    for place, times in ((2, 3), (3, 4), (4, 5)):
        assert f"tripped {times} times in a row" in results[place]


def test_a_scaler_that_skips_for_other_parameters_leaves_the_row_of_a_trap_alone() -> None:
    rule = {**TRAP, "params": "0.*", "then": "skip-step", "give_up_after": 2}
    faults = ["nan", "other", "other", "nan"]
    results = steps_under_a_scaler(linears(2, 2, 1), rule, faults)
    assert results[:3] == ["went on"] * 3
    assert "tripped 2 times in a row" in results[3]


@pytest.mark.parametrize("rules", [[], [TRAP | {"then": "skip-step"}]])
def test_a_fused_optimizer_makes_no_state_for_what_is_frozen_in_an_overflow(
    rules: list[Json],
) -> None:
    model, optimizer = make("AdamW fused")
    scaler = cpu_scaler(2.0**16)
    frozen = {"id": "frozen", "action": "freeze", "params": "0.bias"}
    with attach(model, frozen, *rules, optimizer=optimizer, scaler=scaler):
        scaled_step(scaler, optimizer, loss_of(model) * 1e38)
        assert model[0].bias not in optimizer.state
        assert model[0].bias.grad is not None
        assert scaler.get_scale() == 2.0**15
        scaled_step(scaler, optimizer, loss_of(model))
    assert model[0].bias not in optimizer.state


@pytest.mark.cell("GradScaler", "backward", refused="`sanitize`: the scaler must see its overflow")
def test_sanitize_is_refused_where_a_scaler_must_see_its_overflow() -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu")
    sanitize = {"id": "r0", "action": "sanitize", "params": "*"}
    with pytest.raises(BindError, match=r"rule r0: an enabled GradScaler must see its overflow"):
        attach(model, sanitize, scaler=scaler)
    assert model[0].weight._backward_hooks is None
    with attach(model, sanitize), pytest.raises(BindError, match="rule r0: "):
        train(model, optimizer, scaler, steps=1)
    with attach(model, sanitize, scaler=GradScaler("cpu", enabled=False)):
        train(model, optimizer, None, steps=1)


def norm_of(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]


def true_norm(loss: Tensor, param: Tensor) -> Any:
    """Return the norm of a gradient, to compare records with."""
    (grad,) = torch.autograd.grad(loss, param, retain_graph=True)
    return pytest.approx(grad.norm().item(), rel=1e-5)


def test_each_pass_is_taken_for_itself() -> None:
    torch.manual_seed(4)
    # One without a scale comes after one that has a scale.
    scales = {"large": 1024.0, "plain": 1.0, "small": 16.0}
    net: Any = nn.ModuleDict({name: nn.Linear(4, 3) for name in scales})
    optimizers = {name: sgd(net[name]) for name in scales}
    scalers = {
        name: GradScaler("cpu", init_scale=scale, enabled=name != "plain")
        for name, scale in scales.items()
    }
    clip = {"action": "clip-norm", "per": "rule", "max_norm": 0.05}
    bound = {"action": "clamp", "params": "*.bias", "at": "backward", "min": -0.01, "max": 0.01}
    clips = [{**clip, "params": f"{name}.*"} for name in scales]
    with attach(net, LOG, {**LOG, "at": "step"}, {**TRAP, "id": "t"}, bound, *clips) as session:
        # All losses are scaled before the first of them is used.
        losses = {name: net[name](data(1, 5, 4)).square().mean() for name in scales}
        truth = {name: true_norm(loss, net[name].weight) for name, loss in losses.items()}
        scaled = [(name, scalers[name].scale(loss)) for name, loss in losses.items()]
        for name, loss in scaled:
            loss.backward()
            assert net[name].bias.grad.abs().max() / scales[name] == pytest.approx(0.01)
        for name in scales:
            scalers[name].step(optimizers[name])
            assert norm_of(net[name]) == pytest.approx(0.05, rel=1e-4)
            for rule in ("r0", "r1"):
                assert session.latest(f"{name}.weight", rule=rule) == truth[name]


def test_a_pass_that_raised_leaves_no_scale_behind() -> None:
    model, optimizer = make()

    def fail(_grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    with attach(model, LOG) as session:
        out = model(data(0, 5, 4))
        out.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            cpu_scaler(1024.0).scale(out.square().mean()).backward()
        loss = loss_of(model)
        truth = true_norm(loss, model[0].weight)
        take_step(optimizer, loss)
        assert session.latest("0.weight") == truth


def test_the_passes_inside_a_scaled_one_carry_its_scale() -> None:
    model, optimizer = make()
    scaler = cpu_scaler(1024.0)
    with attach(model, LOG) as session:
        x = data(0, 5, 4).requires_grad_()
        truth = true_norm(model(x).square().mean(), model[0].weight)
        for factor in (math.inf, 1.0):
            out: Any = checkpoint(model, x, use_reentrant=True)
            scaled_step(scaler, optimizer, out.square().mean() * factor)
        first, second = (value for _, value in session.history("0.weight"))
        assert math.isnan(first)
        assert second == truth


class Doubling(torch.amp.GradScaler):
    """Scales and steps in its own ways, as `ShardedGradScaler` does."""

    def scale(self, outputs: Any) -> Any:
        assert self._enabled
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.cell("GradScaler", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("GradScaler, fused optimizer", "backward", "accumulated", "step")
@pytest.mark.parametrize(("own", "fused"), [(True, False), (False, False), (False, True)])
def test_records_and_captures_are_in_true_units_also_of_scalers_that_scale_in_their_own_way(
    own: bool, fused: bool
) -> None:
    methods = [GradScaler.scale, GradScaler.step]
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    points = ("backward", "accumulated", "step")
    stats = ["l2", "linf", "mean", "zeros"]
    logs = [{**LOG, "id": at, "at": at, "stats": stats} for at in points]
    kept = [{"id": f"of-{at}", "action": "capture", "params": "*", "at": at} for at in points]
    of_module = {"id": "module", "action": "norm-log", "modules": "0", "tensor": "output.grad"}
    with attach(model, *logs, *kept, of_module) as session:
        assert methods != [GradScaler.scale, GradScaler.step]
        kind = Doubling if own else GradScaler
        scaler: Any = kind("cpu", init_scale=1024.0)
        for fault in (1.0, math.inf, 1.0):
            scaled_step(scaler, optimizer, model(torch.ones(1, 2)).sum() * fault)
        for at in points:
            found = [session.latest("0.weight", stat, rule=at) for stat in stats]
            assert found == pytest.approx([2**0.5, 1.0, 1.0, 0.0])
            *_, captured = session.captured(f"of-{at}").values()
            assert captured.tolist() == [[1.0, 1.0]]
        assert session.latest("0", rule="module") == 1.0
        assert session.step == 3
        assert kinds_of(session) == ["scaler-skip"]
    assert methods == [GradScaler.scale, GradScaler.step]
    assert "__wrapped__" not in vars(vars(Doubling)["scale"])


def test_a_wrapper_that_came_later_stays_when_the_rules_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    monkeypatch.setattr(GradScaler, "step", GradScaler.step)  # is put back in the end
    calls = []
    session = attach(model, {"id": "z", "action": "zero", "params": "*", "at": "step"})
    ours = GradScaler.step

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    GradScaler.step = theirs  # type: ignore[method-assign]
    session.remove()
    assert GradScaler.step is theirs
    before = weights_of(model)
    scaler = GradScaler("cpu")
    scaled_step(scaler, optimizer, model(torch.ones(1, 2)).sum())
    assert calls == [scaler]
    assert not equal(before, model.parameters())
