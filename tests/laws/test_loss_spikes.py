"""`spike-trap` on losses: the loss of each update, summed over its micro-batches, in true units."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from pack_trainings import launched
from ranks import Json
from small import events_of, fields_of, messages, rule_file, sgd
from spikes import rebuilt
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradientSpikeError, GradSurgeonError, GradSurgeonWarning, Session

SIGMAS = {"sigmas": 6, "warmup": 5}
# Powers of two: sums of parts, and what a scale is divided out of, are exact.
HEALTHY = (1.0, 1.25, 0.75, 1.125, 0.875, 1.0, 1.25, 0.75)


class Level(nn.Module):
    """Its loss is what the test gives, and its gradient is 1 in each update."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, level: float) -> Tensor:
        # Of the value only the level is left.
        return self.w - self.w.detach() + level


def rule(**options: Any) -> Json:
    return {
        "id": "spikes", "action": "spike-trap", "tensors": "loss", "tensor": "value",
        "above": SIGMAS, "then": "skip-step", **options,
    }  # fmt: skip


def train(
    losses: Sequence[float],
    *,
    parts: int = 1,
    scale: float = 0.0,
    fused: bool = False,
    state: Json | None = None,
    mode: Literal["act", "observe"] = "act",
    **options: Any,
) -> tuple[Session, list[int]]:
    """Train with these losses; return the steps whose update did not take place."""
    model = Level()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    resting = []
    rules = rule_file(rule(**options))
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        gradsurgeon.apply(model, rules, optimizer=optimizer, mode=mode) as session,
    ):
        if state is not None:
            session.load_state_dict(state)
        for step, level in enumerate(losses):
            before = model.w.item()
            optimizer.zero_grad()
            for _ in range(parts):
                scaler.scale(model(level / parts)).backward()
            scaler.step(optimizer)
            scaler.update()
            if model.w.item() == before:
                resting.append(step)
    return session, resting


def learnt(session: Session) -> list[Any]:
    (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
    numbers: list[Any] = statistic["kept"][:, 0].tolist()
    return numbers


@pytest.mark.parametrize(
    "setup", ["plain", "accumulated", "scaled", "scaled, accumulated", "scaled, fused"]
)
def test_an_update_whose_loss_is_a_spike_does_not_take_place(setup: str) -> None:
    losses = [*HEALTHY, 8.0, 1.0, math.nan, 1.0]
    parts = 4 if "accumulated" in setup else 1
    scale = 1024.0 if "scaled" in setup else 0.0
    session, resting = train(losses, parts=parts, scale=scale, fused="fused" in setup)
    assert resting == [8, 10]
    healthy = torch.tensor([*HEALTHY, 1.0, 1.0], dtype=torch.float64)
    mean, variance = 0.0, 0.0
    for number, loss in enumerate(healthy.tolist()):
        if number < SIGMAS["warmup"]:
            so_far = healthy[: number + 1]
            mean, variance = so_far.mean().item(), so_far.var(correction=0).item()
            continue
        mean = 0.97 * mean + 0.03 * loss
        variance = 0.97 * variance + 0.03 * (loss - mean) ** 2
    assert learnt(session) == pytest.approx([10.0, mean, variance])
    first, second = messages(session, "spike")
    assert first.startswith(
        "step 8, rule spikes: spike: loss 8 is above 2.07 (running mean 1, standard deviation 0.179, known from 8 updates so "
        "far; bound: 6 standard deviations above the mean)\nstep skipped: its optimizer got no gradient"
    )
    assert second.startswith("step 10, rule spikes: spike: loss is NaN\n")
    assert fields_of(session, "name", kind="spike") == ["loss", "loss"]


def test_warn_and_observe_change_nothing_and_the_bound_learns_a_spike_as_the_bound() -> None:
    losses = [*HEALTHY, 8.0, 1.0]
    warned, resting = train(losses, then="warn")
    assert resting == []
    assert messages(warned, "spike")[0].endswith("the update goes on (`then: warn`)")
    observed, resting = train(losses, mode="observe")
    assert resting == []
    outcome = "observing only: `then: skip-step` would have acted"
    assert messages(observed, "spike")[0].endswith(outcome)
    assert learnt(observed) == learnt(warned)
    assert learnt(warned)[0] == 10
    assert 1.0 < learnt(warned)[1] < 1.1


def test_raise_stops_before_any_weight_moves_and_so_do_too_many_spikes_in_a_row() -> None:
    with pytest.raises(GradientSpikeError, match="spike: loss 8 is above 5") as stopped:
        train([1.0, 8.0], above={"norm": 5}, then="raise")
    assert (stopped.value.step, stopped.value.name) == (1, "loss")
    with pytest.raises(GradientSpikeError, match="tripped 2 times in a row") as stopped:
        train([1.0, 8.0, 9.0], above={"norm": 5}, give_up_after=2)
    assert stopped.value.step == 2


@pytest.mark.parametrize("above", [{"norm": -1.0}, {"sigmas": 6}, {"percentile": 99}])
def test_losses_below_0_have_a_bound_too(above: Json) -> None:
    """A likelihood may be any number."""
    if "norm" in above:
        with pytest.raises(GradSurgeonError, match="`norm` must be greater than 0"):
            train([1.0], above=above)
        return
    losses = [-level for level in HEALTHY] * 15
    session, resting = train([*losses, 3.0], above=above)
    assert resting == [len(losses)]
    assert learnt(session)[1] == pytest.approx(-1.0, abs=0.2)


def test_a_resumed_bound_is_an_unbroken_one() -> None:
    losses = [-level for level in HEALTHY] + [8.0, *HEALTHY]
    whole, _ = train(losses)
    state = None
    for part in (losses[:5], losses[5:9], losses[9:]):
        session, _ = train(part, state=state)
        state = rebuilt(session.state_dict())
    assert learnt(session) == learnt(whole)
    assert events_of(session, "notice") == []
    damaged: Any = copy.deepcopy(whole.state_dict())
    damaged["rules"]["spikes"]["statistics"][0]["kept"][0] = -1.0
    with pytest.raises(GradSurgeonError, match="numbers that a rule never learns"):
        train([], state=damaged)
    with pytest.warns(GradSurgeonWarning, match="`sigmas`, per: loss, and is `norm`, per: loss"):
        _load(whole.state_dict(), rule(above={"norm": 5}))
    norms = {"id": "spikes", "action": "spike-trap", "params": "*", "above": SIGMAS}
    with pytest.warns(GradSurgeonWarning, match="per: loss, and is `sigmas`, per: rule"):
        _load(whole.state_dict(), norms)


def _load(state: Json, rule: Json) -> None:
    with gradsurgeon.apply(Level(), rule_file(rule)) as session:
        session.load_state_dict(state)


def test_each_loss_of_an_update_has_a_bound_of_its_own() -> None:
    model = Level()
    optimizer = sgd(model, 1.0)
    above: Json = {"percentile": 80, "window": 5}
    rules = rule_file(rule(tensors="*loss*", above=above, then="warn"))
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for step in range(12):
            optimizer.zero_grad()
            first, second = model(100.0), model(1.0 if step < 11 else 2.0)
            first.backward()
            # The second loss comes in every other update at first.
            if step % 2 or step > 7:
                second.backward()
            if step < 11:
                optimizer.step()
        with pytest.warns(GradSurgeonWarning, match=r"loss\[1\] 2 is above 1.2 \(percentile 80"):
            optimizer.step()
    (event,) = events_of(session, "spike")
    assert (event.step, event.name) == (11, "loss[1]")
    (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert statistic["params"] == ["loss", "loss[1]"]
    assert statistic["kept"][0].tolist() == [12, 8]
    assert statistic["kept"][2:].t().sort().values.tolist() == [[100] * 5, [1, 1, 1, 1, 2]]


def test_a_loss_that_is_weighted_right_before_its_pass_has_a_name_of_its_own() -> None:
    model = Level()
    optimizer = sgd(model, 1.0)
    rules = rule_file(rule(tensors="loss[1]", above={"norm": 3}))
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for level in (1.0, 8.0):
            optimizer.zero_grad()
            loss = model(level)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            optimizer.step()
    (text,) = messages(session, "spike")
    assert text.startswith("step 1, rule spikes: spike: loss[1] 4 is above 3 (")


def test_a_name_that_no_loss_has_is_told_and_judges_nothing() -> None:
    losses = [8.0] * 12
    session, resting = train(losses, above={"norm": 5}, tensors="loss_of_the_critic")
    assert resting == []
    assert session.state_dict()["rules"]["spikes"]["statistics"] == []
    told = messages(session, "never-fired")
    assert "was due in 12 steps and never fired: no loss of an update has such a name" in told[-1]
    assert told[-1].endswith("; the last update had `loss`")


def test_a_tag_of_the_script_with_this_name_changes_nothing() -> None:
    model = Level()
    optimizer = sgd(model, 1.0)
    logged = {"id": "tags", "action": "norm-log", "tensors": "loss", "tensor": "value"}
    rules = rule_file(rule(above={"norm": 5}, then="warn"), logged)
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for level in (1.0, 8.0):
            loss = gradsurgeon.tag(model(level), "loss")
            optimizer.zero_grad()
            (loss / 2).backward()
            optimizer.step()
    assert events_of(session, "spike") == []
    (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert statistic["kept"][:, 0].tolist() == pytest.approx([2.0, 0.97 * 0.5 + 0.03 * 4.0])
    assert [norm for _, norm in session.history("loss", rule="tags")] == [1.0, 8.0]


def test_of_a_closure_that_is_evaluated_several_times_the_first_loss_is_judged() -> None:
    model = Level()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    calls = [0]

    def closure() -> Tensor:
        calls[0] += 1
        lbfgs.zero_grad()
        loss: Tensor = model(3.0) + 100.0 * (model.w - 1.0) ** 2
        loss.backward()
        return loss

    rules = rule_file(rule(above={"norm": 50}, then="warn"))
    with gradsurgeon.apply(model, rules, optimizer=lbfgs) as session:
        with pytest.warns(GradSurgeonWarning, match="loss 103 is above 50"):
            lbfgs.step(closure)  # type: ignore[arg-type, unused-ignore] # torch's own signature
        assert calls[0] > 1
        assert len(events_of(session, "spike")) == 1
        (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
        assert statistic["kept"][:, 0].tolist() == [1.0, 50.0]
    refused = rule_file(rule(above={"norm": 50}))
    with pytest.raises(GradSurgeonError, match="LBFGS moves all parameters together"):
        gradsurgeon.apply(model, refused, optimizer=lbfgs)


@pytest.mark.parametrize(("rules", "takes"), [(rule(), False), ({**rule(), "tensors": None, "tensor": None, "params": "*"}, True)])  # fmt: skip
def test_of_a_loss_alone_no_gradient_is_looked_at(rules: Json, takes: bool) -> None:
    model = Level()
    optimizer = sgd(model, 1.0)
    called = set()
    given = {key: value for key, value in rules.items() if value is not None}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_qualname)

    with gradsurgeon.apply(model, rule_file(given), optimizer=optimizer):
        model(1.0).backward()
        sys.setprofile(note)
        model(1.0).backward()
        optimizer.step()
        sys.setprofile(None)
    assert "LossSpikes.look" in called or takes
    assert ("Gradients.having" in called, "PassHistory.add" in called) == (takes, takes)


def test_losses_are_judged_and_recorded_beside_norms() -> None:
    model = Level()
    optimizer = sgd(model, 1.0)
    norms = {"id": "norms", "action": "norm-log", "params": "*", "steps": {"every": 2}}
    with gradsurgeon.apply(
        model, rule_file(rule(above={"norm": 5}), norms), optimizer=optimizer
    ) as session:
        for level in (1.0, 8.0, 2.0):
            optimizer.zero_grad()
            model(level).backward()
            optimizer.step()
    assert session.history("loss", stat="loss") == [(0, 1.0), (1, 8.0), (2, 2.0)]
    assert [event.step for event in events_of(session, "spike")] == [1]


def test_rules_under_the_launcher_judge_the_loss_of_a_script() -> None:
    def script() -> Sequence[Tensor]:
        model = Level()
        optimizer = sgd(model, 1.0)
        for level in (1.0, 8.0, 2.0):
            optimizer.zero_grad()
            model(level).backward()
            optimizer.step()
        return [model.w]

    seen = launched(script, [rule(above={"norm": 5})])
    assert [float(weight) for weight in seen.weights] == [-2.0]
    assert any("checked 3 updates, tripped 1 time, last at 1" in line for line in seen.lines)


def test_the_plan_says_what_is_judged_and_when() -> None:
    plan = gradsurgeon.plan(Level(), rule_file(rule()))
    text = str(plan)
    assert "spikes  spike-trap  step  step pre-hook  1 loss name         -  all" in text
    assert (
        "spikes: judges the losses of updates that have such a name; each rank judges its own"
        in text
    )
    assert "torch.compile" not in text
