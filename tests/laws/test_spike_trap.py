"""`spike-trap` is ZClip and AdaGC as the papers have them, and nothing enters its statistic that did not happen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pairs import slow
from ranks import Json
from running_bounds import AdaGC, Bound, ZClip, bound
from small import attach, equal, kinds_of, messages, sgd
from spikes import rebuilt
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradientSpikeError, GradSurgeonWarning, Session

ZCLIP = {"sigmas": 2.5, "beta": 0.9, "warmup": 10}
ADAGC = {"times": 1.5, "beta": 0.9, "warmup": 10}
_FORMS = [
    pytest.param(ZCLIP, id="sigmas"),
    pytest.param(ADAGC, id="times", marks=pytest.mark.slow),
]
_PERCENTILE = pytest.param({"percentile": 70, "window": 20}, id="percentile")
FORMS = pytest.mark.parametrize("above", _FORMS)
ALL_FORMS = pytest.mark.parametrize("above", [*_FORMS, _PERCENTILE])


def passed(reference: Bound, norm: float) -> float:
    """Return what a norm is cut to, and learn it."""
    cut = reference.passes(norm)
    reference.learn(cut)
    return cut


class Leaves(nn.Module):
    """Parameters whose gradients the test gives."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def give(self, grads: Sequence[Tensor | None]) -> None:
        used = [(w, grad) for w, grad in zip(self.w, grads, strict=True) if grad is not None]
        sum((w * grad).sum() for w, grad in used).backward()


def rule(above: dict[str, float], **options: Any) -> Json:
    return {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, **options}


def series(number: int = 60, seed: int = 0) -> list[float]:
    """Return norms that drift by a factor of ten, with noise and a spike now and then."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(number, generator=generator).mul(0.2).exp().tolist()
    spikes = {number // 3: 20.0, number // 2: 7.0, number - 5: 40.0}
    return [10 ** (step / number) * noise[step] * spikes.get(step, 1.0) for step in range(number)]


def directions(sizes: Sequence[int], seed: int = 1) -> list[Tensor]:
    """Return tensors whose norm all together is 1."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, generator=generator) for size in sizes]
    whole = torch.cat(made).norm()
    return [one / whole for one in made]


def norms_of(model: Leaves) -> list[float]:
    return [0.0 if w.grad is None else float(w.grad.double().norm()) for w in model.w]


def learnt(session: Session, of: str = "spikes") -> list[Any]:
    parts = session.state_dict()["rules"][of]["statistics"]
    return [part["kept"].tolist() for part in parts]


# --- what enters ----------------------------------------------------------------------------------


Grads = Sequence[Tensor | None]


def run(rules: Sequence[Json], given: Sequence[Grads], mode: Any = "act") -> tuple[Session, Any]:
    """Train with given gradients; return their norms after each update."""
    model = Leaves(5, 6)
    reached = []
    optimizer = sgd(model, 0.0)
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        attach(model, *rules, mode=mode, optimizer=optimizer) as session,
    ):
        for grads in given:
            optimizer.zero_grad()
            model.give(grads)
            optimizer.step()
            reached.append(norms_of(model))
    return session, reached


def along(norms: Sequence[float]) -> list[list[Tensor]]:
    """Return gradients of some norms, all in one direction."""
    return [[norm * part for part in directions([5, 6])] for norm in norms]


def trained(
    above: dict[str, float], norms: Sequence[float], *more: Json, mode: Any = "act", **options: Any
) -> tuple[Session, list[float]]:
    """Train with gradients of some norms; return the norms after each update."""
    session, reached = run([*more, rule(above, **options)], along(norms), mode)
    return session, [math.hypot(*each) for each in reached]


def test_what_is_not_given_is_that_of_the_papers() -> None:
    norms = series(150)
    for above, spelled_out in (
        ({"sigmas": 2.5}, ZClip(2.5, beta=0.97, warmup=25)),
        ({"times": 1.05}, AdaGC(1.05, beta=0.98, warmup=100)),
    ):
        session, reached = trained(above, norms)
        assert reached == pytest.approx([passed(spelled_out, norm) for norm in norms], rel=1e-5)
        number, mean = learnt(session)[0][:2]
        assert number == [150.0]
        assert mean == pytest.approx([spelled_out.mean], rel=1e-5)
        assert spelled_out.passes(1000.0) < 1000.0
        cut = kinds_of(session).count("spike")
        assert session.status()["spikes"].changed == pytest.approx(cut / 150)


BAD = [math.nan, math.inf]


@ALL_FORMS
@pytest.mark.parametrize("then", ["clip", *slow("warn")])
def test_what_is_not_finite_never_enters(above: dict[str, float], then: str) -> None:
    healthy = series()
    faulty = list[float]()
    for bad, norm in zip(BAD * 30, healthy, strict=True):
        faulty += [bad, bad, norm]
    (one, _), (other, reached) = (trained(above, norms, then=then) for norms in (healthy, faulty))
    assert learnt(one) == learnt(other)
    assert sum(not math.isfinite(norm) for norm in reached) == 2 * len(healthy)
    told = messages(other, "notice")
    assert any("not finite" in text for text in told) == (then == "clip")


@FORMS
def test_a_norm_of_zero_does_not_enter(above: dict[str, float]) -> None:
    # An adapter that begins at zero has no gradient in its first steps, and must not stay there.
    session, reached = trained(above, [0.0] * 30 + [1.0] * 30)
    assert reached[-1] == pytest.approx(1.0)
    assert learnt(session)[0][0] == [30.0]


@FORMS
def test_a_step_that_another_trap_skips_does_not_enter(above: dict[str, float]) -> None:
    reference = bound(above)
    norms = series()
    given = along(norms)
    for _, bad in given[1::3]:
        bad.fill_(math.nan)
    guard = {"id": "guard", "action": "nan-trap", "params": "w.1", "then": "skip-step"}
    _, reached = run([{**rule(above), "params": "w.0"}, guard], given)
    for step, (grads, after) in enumerate(zip(given, reached, strict=True)):
        before = float(grads[0].norm())
        expected = before if step % 3 == 1 else passed(reference, before)
        assert after[0] == pytest.approx(expected, rel=1e-6)


@FORMS
def test_outside_of_its_steps_nothing_is_learnt(above: dict[str, float]) -> None:
    norms = series()
    session, reached = trained(above, norms, steps={"from": 10, "to": 50, "every": 2})
    reference = bound(above)
    for step, (norm, after) in enumerate(zip(norms, reached, strict=True)):
        due = 10 <= step < 50 and step % 2 == 0
        assert after == pytest.approx(passed(reference, norm) if due else norm, rel=1e-5)
    assert learnt(session)[0][0] == [20.0]


@FORMS
def test_warning_and_observing_learn_what_a_clip_would(above: dict[str, float]) -> None:
    norms = series()
    clipping, _ = trained(above, norms)
    for options in ({"then": "warn"}, {"mode": "observe"}, {"mode": "observe", "then": "raise"}):
        session, reached = trained(above, norms, **options)
        assert learnt(session) == learnt(clipping), options
        assert reached == pytest.approx(norms, rel=1e-5)
        spikes = [event.step for event in session.events if event.kind == "spike"]
        assert spikes == [event.step for event in clipping.events if event.kind == "spike"]


@FORMS
def test_what_a_freeze_hides_has_no_part(above: dict[str, float]) -> None:
    reference = bound(above)
    given = along(series())
    hide = {"id": "hide", "action": "freeze", "params": "w.1", "steps": {"every": 2}}
    _, reached = run([rule(above), hide], given)
    for step, (grads, after) in enumerate(zip(given, reached, strict=True)):
        is_hidden = step % 2 == 0
        first, second = (float(grad.norm()) for grad in grads)
        before = first if is_hidden else math.hypot(first, second)
        factor = passed(reference, before) / before
        wanted = [factor * first, second if is_hidden else factor * second]
        assert after == pytest.approx(wanted, rel=1e-5)


def test_it_judges_before_the_rules_above_it_and_cuts_after_them() -> None:
    scale = {"id": "double", "action": "scale", "params": "*", "factor": 2.0, "at": "step"}
    norms = [1 + 0.1 * math.sin(step) for step in range(30)] + [10.0]
    plain, after = trained(ZCLIP, norms)
    doubled, after_doubled = trained(ZCLIP, norms, scale)
    assert learnt(plain) == learnt(doubled)
    assert after_doubled == pytest.approx([2 * norm for norm in after], rel=1e-5)


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [False, True])
def test_a_spike_in_the_first_of_two_passes_is_reported(guarded: bool) -> None:
    model = Leaves(5, 6)
    optimizer = sgd(model, 0.0)
    guard = {"id": "guard", "action": "nan-trap", "params": "*"}
    several = [guard, rule(ZCLIP, then="raise")]
    with attach(model, *several[not guarded :], optimizer=optimizer):
        for step in range(21):
            optimizer.zero_grad()
            size = 1 + 0.1 * math.sin(step) + (1000.0 if step == 20 else 0.0)
            model.give([torch.full((5,), size), None])
            model.give([None, torch.ones(6)])
            if step < 20:
                optimizer.step()
        with pytest.raises(GradientSpikeError) as caught:
            optimizer.step()
    assert caught.value.name == "w.0"


# --- going on -------------------------------------------------------------------------------------


def part(several: Sequence[Json], first: int, last: int, state: Any) -> Any:
    """Train for some of 60 steps, from what an earlier part has left; return what is left."""
    model = Leaves(5, 6)
    optimizers = [torch.optim.AdamW([w], lr=1e-2) for w in model.w]
    with attach(model, *several, optimizer=optimizers) as session:
        if state is not None:
            model.load_state_dict(state["model"])
            for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            session.load_state_dict(state["session"])
        for step in range(first, last):
            model.zero_grad()
            model.give([series()[step] * unit for unit in directions([5, 6])])
            for optimizer in optimizers[: 2 if step % 2 else 1]:
                optimizer.step()
        kept = [optimizer.state_dict() for optimizer in optimizers]
        return {"model": model.state_dict(), "optimizers": kept, "session": session.state_dict()}


# A rule whose every step was skipped says that it never fired.
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("per", ["rule", *slow("parameter")])
@ALL_FORMS
def test_a_resumed_run_is_an_unbroken_one(above: dict[str, float], per: str) -> None:
    """With schedules, two optimizers, and rows of skipped steps."""
    skips = rule(above, then="skip-step", give_up_after=40, steps={"from": 15})
    late = {"action": "scale", "params": "w.0", "at": "step", "factor": 0.5}
    several = [
        rule(above, per=per),
        {**skips, "id": "skips"},
        {**late, "id": "late", "steps": {"every": 7}},
    ]
    whole = part(several, 0, 60, None)
    state: Any = None
    for first, last in ((0, 5), (5, 29), (29, 56), (56, 60)):
        state = rebuilt(part(several, first, last, state))
    assert equal(whole["model"].values(), state["model"].values())
    one = whole["session"]
    other = state["session"]
    rules_of_one = one.pop("rules")
    rules_of_other = other.pop("rules")
    assert one == other
    for of_rule in ("spikes", "skips"):
        parts = (of[of_rule]["statistics"] for of in (rules_of_one, rules_of_other))
        for left, right in zip(*parts, strict=True):
            assert left["params"] == right["params"]
            assert torch.equal(left["kept"], right["kept"])
            assert torch.equal(left["usual"], right["usual"])


def test_a_state_of_other_rules_and_parameters_is_told_apart_by_name() -> None:
    session, _ = trained(ZCLIP, series(), per="parameter")
    state = session.state_dict()
    state["rules"]["\x1b[31mred"] = state["rules"]["spikes"]
    model = Leaves(5, 6, 7)
    with attach(model, rule(ADAGC, per="parameter"), {**rule(ZCLIP), "id": "new"}) as other:
        with pytest.warns(GradSurgeonWarning) as told:
            other.load_state_dict(state)
        texts = [str(one.message) for one in told]
    assert len(texts) == 4
    assert any("w.2" in text and "the state does not have" in text for text in texts)
    assert any("rule spikes" in text and "`sigmas`" in text and "`times`" in text for text in texts)
    assert any("rule new" in text and "the rule restarts" in text for text in texts)
    # A rule that only the state knows is told in letters that show.
    assert any("\\x1b[31mred" in text for text in texts)
    assert "\x1b" not in "".join(texts)
    assert other.step == 60
    assert learnt(other) == []


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 1}, [1], "x", {"version": 2, "steps": {}, "rules": {}}],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with (
        attach(Leaves(3), rule(ZCLIP)) as session,
        pytest.raises(gradsurgeon.GradSurgeonError, match="state"),
    ):
        session.load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [("*", "w.0"), ("w.0", "*")])
@pytest.mark.parametrize("per", ["rule", "parameter"])
def test_a_rule_on_other_parameters_is_told_of(per: str, before: str, after: str) -> None:
    spikes = rule(ZCLIP, per=per)
    session, _ = run([{**spikes, "params": before}], along(series()))
    model = Leaves(5, 6)
    with attach(model, {**spikes, "params": after}, optimizer=sgd(model)) as other:
        with pytest.warns(GradSurgeonWarning, match=r"other parameters .*\(w\.1\)"):
            other.load_state_dict(session.state_dict())
        assert len(learnt(other)) == (0 if per == "rule" else 1)
