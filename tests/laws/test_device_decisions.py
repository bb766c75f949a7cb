"""Updates that a device decides on: fused optimizers leave them out by a flag, and the host reads it before the next one.

The fused kernels of the CPU obey that flag as those of CUDA do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from bounds import TIMEOUT
from commands import environment
from fused_trainings import (
    OPTIMIZERS,
    STEPS,
    Case,
    batch,
    decided_on_the_cpu,
    differences,
    drawn,
    net,
    train,
    waiting,
)
from models import data
from outside import Folder
from ranks import Json
from small import attach, equal, events_of, fields_of, kinds_of, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError
from gradsurgeon.forensics import kept_step

# Scalers that skip for a NaN, rules that warn, and parameters that are replaced.
pytestmark = pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
SKIPS: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
RAISES: Json = {**SKIPS, "then": "raise"}
CLIP: Json = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 0.1, "per": "rule"}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with decided_on_the_cpu():
        yield


def fused(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True, **options)


def backward(model: nn.Module, step: int, *, bad: bool = False) -> None:
    for param in model.parameters():
        param.grad = None
    x = batch(step)
    if bad:
        x[0, 0] = math.nan
    model(x).square().mean().backward()


def steps(model: nn.Module, optimizer: Any, *bad: int, last: int = 6) -> None:
    """Make updates, of which some have NaN in the input."""
    for step in range(last):
        backward(model, step, bad=step in bad)
        optimizer.step()


def told_at(session: gradsurgeon.Session) -> list[tuple[int, int | None]]:
    """Return the steps of all trips, with the steps before which the host heard of them."""
    return fields_of(session, "step", "told_at", kind="trap")


def hold_to_waiting(case: Case) -> None:
    """Compare a training in which the device decides with the same training in which the host waits."""
    decided = train(case)
    decided.pop("late")
    with waiting():
        waited = train(case)
    assert waited.pop("late") == 0
    assert differences(decided, waited) == []


@pytest.mark.parametrize("bad", [0, 1, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_leaves_everything_alone(optimizer: str, bad: int) -> None:
    hold_to_waiting(Case(optimizer, [SKIPS], {bad: "nan input", 7: "infinite input"}))


@pytest.mark.parametrize("seed", range(30))
def test_a_random_training_is_the_one_that_waits(seed: int) -> None:
    hold_to_waiting(drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 500, 47))
def test_five_hundred_random_trainings_are_those_that_wait(first: int) -> None:
    for seed in range(first, min(first + 47, 500)):
        hold_to_waiting(drawn(seed))


def test_the_host_hears_of_a_first_step_at_once_and_of_a_later_one_before_the_next() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer)
    # The optimizer makes its state in the first update that it does.
    steps(model, optimizer, 0, 3)
    assert told_at(session) == [(0, None), (3, 4)]
    # The last decision is read when somebody asks.
    backward(model, 6, bad=True)
    optimizer.step()
    assert told_at(session)[-1] == (3, 4)
    session.status()
    assert told_at(session)[-1] == (6, 7)


def test_events_come_in_the_order_in_which_they_are_told() -> None:
    model = net()
    optimizer = fused(model)
    heard: list[gradsurgeon.Event] = []
    session = attach(model, SKIPS, optimizer=optimizer, on_event=heard.append)
    steps(model, optimizer, 2, 3, last=5)
    assert [(event.kind, event.step, event.told_at) for event in heard] == [
        ("trap", 2, 3),
        ("skipped-step", 2, 3),
        ("trap", 3, 4),
        ("skipped-step", 3, 4),
    ]
    assert heard == session.events


def test_the_optimizer_gets_a_flag_of_exactly_0_or_1_and_it_is_gone_afterwards() -> None:
    model = net()
    optimizer = fused(model)
    attach(model, SKIPS, optimizer=optimizer)
    flags: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: flags.append(getattr(optimizer, "found_inf", None)))
    steps(model, optimizer, 2, last=4)
    assert flags[0] is None
    found = [(flag.shape, flag.dtype, flag.item()) for flag in flags[1:]]
    assert found == [((), torch.float32, number) for number in (0.0, 1.0, 0.0)]
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


def refuse(*_: object) -> None:
    raise RuntimeError("the step of the script")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_raises_leaves_the_attributes_as_they_were(
    *, scaled: bool, several: bool
) -> None:
    model: Any = net()
    optimizer = fused(model)
    own: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: own.append(vars(optimizer).get("found_inf")))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    for modules in (model, model[0]) if several else (model,):
        attach(modules, SKIPS, optimizer=optimizer, scaler=scaler)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step == 0:
            scaler.step(optimizer)
            scaler.update()
    optimizer.register_step_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="the step of the script"):
        scaler.step(optimizer)
    # `GradScaler` leaves its own behind.
    assert (own[-1] is not None) is scaled
    assert vars(optimizer).get("found_inf") is own[-1]
    assert ("grad_scale" in vars(optimizer)) is scaled


def test_hooks_after_a_step_find_the_flag_of_the_scaler() -> None:
    model = net()
    optimizer = fused(model)
    found: list[Any] = []
    scales: list[Any] = []

    def find(*_: object) -> None:
        found.append(vars(optimizer)["found_inf"])
        scales.append(vars(optimizer)["grad_scale"])

    optimizer.register_step_pre_hook(find)
    # Torch calls hooks in the order of their registration.
    optimizer.register_step_post_hook(find)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    attach(model, SKIPS, optimizer=optimizer, scaler=scaler)
    optimizer.register_step_pre_hook(find)
    optimizer.register_step_post_hook(find)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        before, lent, *after = found[-4:]
        # The first update makes the state of the optimizer, so the host waits.
        assert (lent is before) is (step == 0)
        assert all(flag is before for flag in after)
        assert [scale.item() for scale in scales[-4:]] == [4.0] * 4


def test_an_overflow_is_an_event_and_no_trap_and_the_scaler_finds_its_flag() -> None:
    model: Any = net()
    optimizer = fused(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session = attach(model, SKIPS, optimizer=optimizer, scaler=scaler)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean() * (1e39 if step == 2 else 1.0)
        scaler.scale(loss).backward()
        if step == 3:
            # Not the scaler sees this one: it has looked already.
            scaler.unscale_(optimizer)
            model[0].bias.grad[0] = math.nan
        before = weights_of(model)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, weights_of(model))) is (step in (2, 3))
    assert fields_of(session, "kind", "step", "told_at") == [
        ("scaler-skip", 2, 3),
        ("trap", 3, 4),
        ("skipped-step", 3, 4),
    ]


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e300)]
)
def test_finite_gradients_with_a_norm_that_overflows_are_no_trap(
    dtype: torch.dtype, size: float
) -> None:
    model = nn.Linear(3, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / size, fused=True)
    session = attach(model, SKIPS, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        ((model.weight.sum() + model.bias.sum()) * size).backward()
        if step == 2:
            assert model.bias.grad is not None
            model.bias.grad[0] = math.inf
        before = weights_of(model)
        optimizer.step()
        assert equal(before, weights_of(model)) is (step == 2)
    session.status()
    (trap, skipped) = session.events
    assert (trap.kind, trap.step, trap.told_at) == ("trap", 2, 3)
    assert "  > Inf     bias" in trap.message
    assert skipped.kind == "skipped-step"


# -------------------------------------------------------------------------------------------------
# Who decides
# -------------------------------------------------------------------------------------------------


class Deaf(torch.optim.AdamW):
    """Has `fused` in its groups, and a step of its own that knows of no flag."""

    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["step"] = 1
                    param.data.sub_(param.grad)


class Named(torch.optim.AdamW):
    """Torch's own step under another name."""


def unfused_checkpoint(model: nn.Module) -> Any:
    optimizer = fused(model)
    plain = torch.optim.AdamW(net().parameters())
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["fused"] is None
    return optimizer


def both_kinds(model: Any) -> Any:
    groups = [
        {"params": model[0].parameters(), "fused": True},
        {"params": model[2].parameters(), "fused": False},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


WAITING: dict[str, Callable[[Any], Any]] = {
    "unfused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, foreach=True),
    "a step of its own": lambda model: Deaf(model.parameters(), lr=0.05, fused=True),
    "a checkpoint without fused": unfused_checkpoint,
    "groups of both kinds": both_kinds,
}


@pytest.mark.parametrize("kind", WAITING)
def test_where_the_flag_may_not_be_obeyed_the_host_waits(kind: str) -> None:
    model = net()
    optimizer = WAITING[kind](model)
    session = attach(model, SKIPS, optimizer=optimizer)
    steps(model, optimizer, 0, 3)
    assert told_at(session) == [(0, None), (3, None)]
    assert all(weight.isfinite().all() for weight in weights_of(model))


def test_a_class_without_a_step_of_its_own_is_one_of_torch() -> None:
    model = net()
    optimizer = Named(model.parameters(), lr=0.05, fused=True)
    session = attach(model, SKIPS, optimizer=optimizer)
    steps(model, optimizer, 3)
    assert told_at(session) == [(3, 4)]


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_waits() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(4):
        backward(model, number, bad=number == 2)
        step()
    assert told_at(session) == [(2, None)]


def two_owners(model: Any) -> tuple[Any, ...]:
    return fused(model[0]), fused(model[2])


def test_a_trap_over_two_optimizers_waits_and_one_for_each_does_not() -> None:
    for rules, told in (
        ([SKIPS], None),
        ([{**SKIPS, "params": "0.*"}, {**SKIPS, "id": "other", "params": "2.*"}], 4),
    ):
        model = net()
        optimizers = two_owners(model)
        session = attach(model, *rules, optimizer=list(optimizers))
        for step in range(6):
            backward(model, step, bad=step == 3)
            for optimizer in optimizers:
                optimizer.step()
        session.status()
        steps_told = [pair for pair in told_at(session) if pair[0] == 3]
        assert steps_told
        # The update of the other optimizer comes next, and reads the flag of the first.
        assert {when is None for _, when in steps_told} == {told is None}


@pytest.mark.parametrize(
    "other",
    [
        {"action": "nan-trap", "then": "warn"},
        {"action": "clamp", "at": "step", "max": 1.0},
        {"action": "capture", "at": "step"},
        {"action": "scale", "factor": 2.0, "at": "step"},
    ],
    ids=["warn", "clamp", "capture", "scale"],
)
def test_beside_a_rule_that_needs_the_answer_the_host_waits(other: Json) -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, {"id": "other", "params": "*", **other}, optimizer=optimizer)
    steps(model, optimizer, 3)
    assert {when for _, when in told_at(session)} == {None}


def test_a_parameter_that_a_rule_hides_from_the_optimizer_needs_no_state() -> None:
    model = net()
    optimizer = fused(model)
    hides = {"id": "hidden", "action": "freeze", "params": "0.bias"}
    session = attach(model, SKIPS, hides, optimizer=optimizer)
    steps(model, optimizer, 3)
    assert told_at(session) == [(3, 4)]


def test_an_observing_session_sets_no_flag() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer, mode="observe")
    optimizer.register_step_pre_hook(lambda *_: check_bare(optimizer))
    steps(model, optimizer, 3)
    assert told_at(session)[0] == (3, None)


def check_bare(optimizer: Any) -> None:
    assert not hasattr(optimizer, "found_inf")


# -------------------------------------------------------------------------------------------------
# `raise` comes once, later
# -------------------------------------------------------------------------------------------------


def stopped(*, last: int = 4) -> tuple[nn.Module, Any, gradsurgeon.Session, list[Tensor]]:
    """Return a training whose last update the device has left out."""
    model = net()
    optimizer = fused(model)
    session = attach(model, RAISES, optimizer=optimizer)
    steps(model, optimizer, last=last - 1)
    before = weights_of(model)
    backward(model, last - 1, bad=True)
    optimizer.step()
    return model, optimizer, session, before


SINCE = "this optimizer has made no update since step 3 began; what the script itself has written"


def test_the_next_step_raises_before_it_moves_a_weight() -> None:
    model, optimizer, session, before = stopped()
    backward(model, 4)
    with pytest.raises(NonFiniteGradientError, match=SINCE) as caught:
        optimizer.step()
    assert (caught.value.step, caught.value.rule) == (3, "trap")
    assert all(map(torch.equal, before, weights_of(model)))
    assert told_at(session) == [(3, 4)]
    optimizer.step()
    session.remove()


def test_else_the_state_of_the_session_raises() -> None:
    model, _, session, before = stopped()
    with pytest.raises(NonFiniteGradientError, match=SINCE):
        session.state_dict()
    assert session.state_dict()["step"] == 4
    assert all(map(torch.equal, before, weights_of(model)))
    model.state_dict()
    session.remove()


def test_else_the_end_of_the_session_raises_after_all_is_taken_off() -> None:
    model, optimizer, session, _ = stopped()
    with pytest.raises(NonFiniteGradientError, match=SINCE):
        session.remove()
    assert not optimizer._optimizer_step_pre_hooks  # no public name
    session.remove()
    copy.deepcopy(model)


def test_inside_another_exception_it_is_a_note() -> None:
    *_, session, _ = stopped()
    with pytest.raises(KeyError) as caught, session:
        raise KeyError("the script's own")
    (note,) = caught.value.__notes__
    assert note.startswith("step 3, rule trap: ")
    assert SINCE in note


def test_the_state_of_a_model_is_no_question_to_the_session() -> None:
    model, _, session, _ = stopped()
    model.state_dict()
    assert session.events == []
    with pytest.raises(NonFiniteGradientError):
        session.remove()


def test_patience_ends_one_step_later_and_nothing_has_moved() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, {**SKIPS, "give_up_after": 3}, optimizer=optimizer)
    steps(model, optimizer, last=2)
    before = weights_of(model)
    for step in range(3):
        backward(model, step, bad=True)
        optimizer.step()
    backward(model, 5)
    with pytest.raises(NonFiniteGradientError, match="giving up: tripped 3 times in a row"):
        optimizer.step()
    assert all(map(torch.equal, before, weights_of(model)))
    assert [step for step, _ in told_at(session)] == [2, 3, 4]


# -------------------------------------------------------------------------------------------------
# What the replay reads
# -------------------------------------------------------------------------------------------------


class Root(nn.Module):
    """A model whose square root is NaN once its offset is negative; it has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.offset = 10.0

    def forward(self, x: Tensor) -> Any:
        rooted: Tensor = (self.norm(self.fc(x)) + self.offset).sqrt()
        return self.head(rooted).mean()


def written_between(write: Callable[[Any, Tensor], object]) -> Json:
    """Return the diagnosis of a step, if a script writes something before the next one."""
    model = Root()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer)
    for step in range(4):
        x = batch(step)
        model.offset = -0.5 if step == 2 else 10.0
        optimizer.zero_grad()
        loss = model(x)
        if step == 3:
            # The replay runs the model as it is now.
            model.offset = -0.5
        loss.backward()
        optimizer.step()
        if step == 2:
            write(model, x)
    (trap,) = events_of(session, "trap")
    assert (trap.step, trap.told_at) == (2, 3)
    assert trap.diagnosis is not None
    return dict(trap.diagnosis)


def average(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def test_nothing_written_is_reproduced_although_running_statistics_moved_on() -> None:
    diagnosis = written_between(lambda *_: None)
    assert (diagnosis["certainty"], diagnosis["reasons"]) == ("reproduced", [])


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda model, _: model.fc.weight.data.clamp_(-0.01, 0.01), "fc.weight"),
        (lambda model, _: average(model), "fc.weight, fc.bias, norm.weight and 3 more"),
        (lambda _, x: x.zero_(), "input x"),
        (lambda model, _: setattr(model.head, "bias", nn.Parameter(torch.ones(1))), "head.bias"),
        (lambda model, _: setattr(model.fc.bias, "data", torch.ones(4)), "fc.bias"),
    ],
    ids=["clamp", "average", "input", "replaced", "data"],
)
def test_what_was_written_since_is_named(write: Callable[..., object], names: str) -> None:
    diagnosis = written_between(write)
    assert diagnosis["certainty"] == "partial"
    assert diagnosis["reasons"][0] == f"written since step 2: {names}"


def test_a_gan_and_an_average_between_the_steps_leave_the_replay_exact() -> None:
    critic, maker = Root(), nn.Sequential(nn.Linear(2, 3))
    average_of_critic = torch.optim.swa_utils.AveragedModel(critic)
    ours, theirs = fused(critic), fused(maker)
    session = attach(critic, SKIPS, optimizer=ours)
    noise = data(1, 6, 2)
    for step in range(4):
        ours.zero_grad()
        critic.offset = -0.5 if step == 2 else 10.0
        (critic(batch(step)) + critic(maker(noise).detach())).backward()
        ours.step()
        critic.offset = 10.0
        theirs.zero_grad()
        critic(maker(noise)).backward()
        theirs.step()
        average_of_critic.update_parameters(critic)
        if step == 2:
            critic.offset = -0.5
            session.status()
    (trap,) = events_of(session, "trap")
    assert (trap.step, trap.told_at) == (2, 3)
    assert trap.diagnosis is not None
    assert trap.diagnosis["certainty"] == "reproduced"


def test_both_steps_share_the_bound_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer)
    steps(model, optimizer, last=3)
    # Room for one call and not for two: the older one goes first.
    backward(model, 3, bad=True)
    optimizer.step()
    monkeypatch.setattr(kept_step, "MAX_BYTES", 60_000)
    backward(model, 4)
    optimizer.step()
    (trap,) = events_of(session, "trap")
    assert trap.diagnosis is not None
    assert "1 of the calls of this step were not kept" in trap.diagnosis["reasons"][0]


# -------------------------------------------------------------------------------------------------
# What goes by whether the update was made
# -------------------------------------------------------------------------------------------------


def test_a_spike_that_is_skipped_is_not_learnt() -> None:
    rule = {
        "id": "spikes",
        "action": "spike-trap",
        "params": "*",
        "above": {"times": 1.5, "beta": 0.8, "warmup": 2},
        "then": "skip-step",
    }
    hold_to_waiting(Case("adamw", [rule], {5: "spike", 6: "spike", 8: "nan input"}))


@pytest.mark.parametrize("asks", [False, True])
def test_records_edits_and_checks_after_a_skipped_update_are_left_out(*, asks: bool) -> None:
    model = net()
    optimizer = fused(model)
    rules = [
        SKIPS,
        {"id": "weights", "action": "norm-log", "params": "*", "tensor": "value"},
        {"id": "slower", "action": "scale", "params": "*", "tensor": "update", "factor": 0.5},
    ]
    session = attach(model, *rules, optimizer=optimizer)
    if asks:
        # A hook of the script, within the step.
        optimizer.register_step_pre_hook(lambda *_: session.state_dict().clear())
    steps(model, optimizer, 3)
    session.status()
    steps_of_records = [step for step, _ in session.history("0.weight", rule="weights")]
    assert steps_of_records == [0, 1, 2, 4, 5]
    assert session.status()["slower"].fired == 5 * len(weights_of(model))


def test_skipped_steps_do_not_make_a_rule_silent() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, CLIP, optimizer=optimizer)
    steps(model, optimizer, *range(6))
    session.remove()
    assert fields_of(session, "message", rule="clip") == [
        "was never due in an update that took place"
    ]


def test_a_rule_that_never_fires_is_told_although_the_device_decides() -> None:
    model: Any = net()
    optimizer = fused(model)
    model.spare = nn.Parameter(torch.ones(2))
    session = attach(model, SKIPS, {**CLIP, "params": "spare"}, optimizer=optimizer)
    steps(model, optimizer)
    assert fields_of(session, "message", rule="clip")[0].startswith("was due in 3 steps")


def test_a_state_is_loaded_once_the_last_update_is_judged() -> None:
    model = net()
    optimizer = fused(model)
    spikes = {**SKIPS, "action": "spike-trap", "above": {"times": 1.5}}
    session = attach(model, spikes, optimizer=optimizer)
    state = session.state_dict()
    steps(model, optimizer, 3, last=4)
    session.load_state_dict(state)
    assert fields_of(session, "told_at", kind="spike") == [4]


def test_a_flag_that_the_script_has_set_itself_is_obeyed() -> None:
    model = net()
    optimizer = fused(model)
    attach(model, SKIPS, optimizer=optimizer)
    steps(model, optimizer, last=3)
    before = weights_of(model)
    flags = {"grad_scale": None, "found_inf": torch.ones(())}
    vars(optimizer).update(flags)
    steps(model, optimizer, last=1)
    assert flags.items() <= vars(optimizer).items()
    assert equal(before, weights_of(model))


def test_weights_are_edited_after_updates_alone() -> None:
    shrinks = {"id": "shrinks", "action": "scale", "params": "*", "tensor": "value", "factor": 0.9}
    hold_to_waiting(Case("adamw", [SKIPS, shrinks], {4: "nan input"}))


def test_a_repaired_gradient_is_a_notice_and_no_trap() -> None:
    model = net()
    optimizer = fused(model)
    session = attach(model, SKIPS, optimizer=optimizer)
    for step in range(STEPS // 2):
        backward(model, step, bad=step == 3)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_()
        optimizer.step()
    session.status()
    assert kinds_of(session) == ["notice"]
    assert "repaired, no trap" in session.events[0].message
    assert session.events[0].step == 3


@pytest.mark.parametrize("scaled", [False, True])
def test_sessions_of_one_optimizer_each_tell_their_own_trips(*, scaled: bool) -> None:
    model: Any = net()
    optimizer = fused(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    parts = {"first": model[0], "second": model[2], "whole": model}
    sessions = {}
    for name, part in parts.items():
        rule = {**SKIPS, "id": name}
        sessions[name] = attach(part, rule, optimizer=optimizer, scaler=scaler)
    warns = {"action": "nan-trap", "params": "*", "then": "warn"}
    sessions["last"] = attach(nn.Sequential(model), warns, optimizer=optimizer)
    for step in range(7):
        optimizer.zero_grad()
        factor = 1e39 if scaled and step == 5 else 1.0
        scaler.scale(model(batch(step)).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        before = weights_of(model)
        if step == 2:
            model[0].bias.grad[0] = math.nan
        if step == 4:
            model[2].bias.grad[0] = math.nan
        scaler.step(optimizer)
        if scaled:
            scaler.update()
        left_out = step in (2, 4) or factor > 1
        assert all(map(torch.equal, before, weights_of(model))) is left_out
        assert not hasattr(optimizer, "found_inf")
    # The last one waits, and finds no gradients where another one leaves the update out.
    told = {"first": [(2, 3)], "second": [(4, 5)], "whole": [(2, 3), (4, 5)], "last": []}
    assert {name: told_at(session) for name, session in sessions.items()} == told
    for session in sessions.values():
        skipped = fields_of(session, "step", kind="scaler-skip")
        assert skipped == ([5] if scaled else []), session


# -------------------------------------------------------------------------------------------------
# What the plan says
# -------------------------------------------------------------------------------------------------

WARNS: Json = {**SKIPS, "then": "warn"}
PLANNED = {
    "fused": (SKIPS, {"fused": True}, "decided on the device: the host reads"),
    "unfused": (
        SKIPS,
        {},
        "waits once per step: a group of the optimizer has no `fused=True`; `fused=True` avoids it",
    ),
    "warn": (
        WARNS,
        {"fused": True},
        "waits once per step: `then: warn` needs the answer before the update; `then: skip-step` avoids it",
    ),
}


@pytest.mark.parametrize("kind", PLANNED)
def test_the_plan_says_who_decides_and_what_avoids_a_wait(kind: str) -> None:
    rule, options, text = PLANNED[kind]
    model = net()
    make: Any = torch.optim.AdamW
    optimizer = make(model.parameters(), **options)
    session = attach(model, rule, optimizer=optimizer)
    assert text in str(session.plan)
    steps(model, optimizer, last=3)
    notices = [event.message for event in events_of(session, "notice")]
    # Of the rule, if it is one.
    assert [notice.removeprefix("waits once per step: rule trap: ") for notice in notices] == {
        "fused": [],
        "unfused": [text],
        "warn": [text.removeprefix("waits once per step: ")],
    }[kind]


def test_without_an_optimizer_the_plan_says_on_what_it_depends() -> None:
    model = net()
    session = attach(model, SKIPS)
    assert "decided on the device if SGD, Adam, AdamW or Adagrad of torch" in str(session.plan)


def test_on_a_host_nothing_is_said_of_waits() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with waiting():
        session = attach(model, SKIPS, optimizer=optimizer)
        steps(model, optimizer, last=3)
    assert "wait" not in str(session.plan)
    assert session.events == []


LAST = """
import sys, torch
from gradsurgeon.runtime import device_policy
device_policy.DEVICES.add("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(4):
    optimizer.zero_grad()
    x = torch.ones(2, 3)
    if step == 3:
        x[0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
print("the script is over")
"""
RULES = "  - {id: trap, action: nan-trap, params: '*', then: raise}\n"


@pytest.mark.slow
def test_at_the_end_of_a_launch_the_message_goes_to_stderr_and_the_status_is_1(
    tmp_path: Path,
) -> None:
    done = Folder(tmp_path).run(LAST, rules=RULES)
    assert "the script is over" in done.out
    assert any(line.startswith("gradsurgeon: error: step 3, rule trap: ") for line in done.lines)
    assert SINCE in done.err
    assert "  broken: stopped at step 3 by rule trap (NonFiniteGradientError)" in done.lines
    assert done.code == 1


@pytest.mark.slow
def test_a_script_that_exits_with_0_ends_with_1(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(LAST + "sys.exit(0)", RULES)
    done = folder.start("-m", "gradsurgeon", "run", "--rules", "rules.yaml", "train.py")
    assert done.returncode == 1
    assert "  broken: stopped at step 3 by rule trap (NonFiniteGradientError)" in done.stderr


@pytest.mark.slow
def test_at_the_end_of_a_script_that_keeps_its_session_the_message_goes_to_stderr(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    given = (
        f"import gradsurgeon\nsession = gradsurgeon.apply(model, {[RAISES]!r}, optimizer=optimizer)"
    )
    given = given.replace("[{", '{"version": 1, "rules": [{').replace("}]", "}]}")
    script.write_text(LAST.replace("for step", f"{given}\nfor step"), encoding="utf-8")
    done = forks.start([str(script)], cwd=tmp_path, env=environment()).wait(TIMEOUT)
    assert done.returncode == 0
    assert b"step 3, rule trap: 2 of 2 gradients are not finite" in done.stderr
