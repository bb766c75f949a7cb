"""`spike-trap` with a percentile is AutoClip as the paper has it, and with a norm it acts from the first update on."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Json
from small import kinds_of, messages, rule_file, sgd
from torch import nn

import gradsurgeon
from gradsurgeon import GradientSpikeError, GradSurgeonWarning, Session


class Leaves(nn.Module):
    """Parameters whose gradients the test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(3))
        self.w = nn.Parameter(torch.zeros(6))


def rule(above: Any, **options: Any) -> Json:
    return {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, **options}


def series(number: int = 260) -> list[float]:
    """Return norms that rise by a factor of ten, with noise and some spikes."""
    generator = np.random.default_rng(0)
    norms = np.exp(generator.normal(size=number) / 2) * np.linspace(1, 10, number)
    norms[number // 2] *= 30
    norms[number - 20] *= 100
    return [float(norm) for norm in norms]


def train(
    above: Any, norms: Sequence[float], state: Json | None = None, **options: Any
) -> tuple[Session, list[float]]:
    """Train with gradients of these norms over `v` and `w`; return how far each update moved the weights."""
    model = Leaves()
    optimizer = sgd(model, 1.0)
    moved = []
    with (
        warnings.catch_warnings(),
        gradsurgeon.apply(model, rule_file(rule(above, **options)), optimizer=optimizer) as session,
    ):
        warnings.simplefilter("ignore", GradSurgeonWarning)
        if state is not None:
            session.load_state_dict(state)
        for norm in norms:
            with torch.no_grad():
                model.v.zero_()
                model.w.zero_()
            optimizer.zero_grad()
            ((model.v.sum() + model.w.sum()) * (norm / 3)).backward()
            optimizer.step()
            whole = torch.cat([model.v, model.w]).detach().double()
            moved.append(float(whole.norm()))
    return session, moved


def autoclip(norms: Sequence[float], percentile: float, window: int) -> list[float]:
    """Clip by hand: `autoclip` of the paper, with a window."""
    history: list[float] = []
    clipped = []
    for norm in norms:
        if math.isfinite(norm):
            history.append(norm)
        last = history[-window:]
        bound = math.inf
        if len(last) >= min(window, 100):
            bound = float(np.percentile(last, percentile))
        clipped.append(min(norm, bound))
    return clipped


@pytest.mark.parametrize(("percentile", "window"), [(99, 1000), (90, 120), (50, 10)])
def test_a_percentile_is_autoclip_by_hand(percentile: float, window: int) -> None:
    norms = series()
    _, moved = train({"percentile": percentile, "window": window}, norms)
    wanted = autoclip(norms, percentile, window)
    assert moved == pytest.approx(wanted, rel=1e-4)
    assert sum(cut < norm for cut, norm in zip(wanted, norms, strict=True)) > 5


@pytest.mark.parametrize("then", ["skip-step", "warn"])
def test_norms_enter_also_where_the_update_is_skipped_so_the_bound_can_rise(then: str) -> None:
    """A bound that learnt only from what it lets through would skip for ever once norms have doubled."""
    norms = [*np.linspace(1, 1.1, 20), *np.linspace(2, 2.2, 20)]
    above = {"percentile": 80, "window": 10}
    patience: Json = {"give_up_after": "never"} if then == "skip-step" else {}
    session, moved = train(above, norms, then=then, **patience)
    wanted = autoclip(norms, 80, 10)
    spikes = [cut < norm for cut, norm in zip(wanted, norms, strict=True)]
    assert 5 < sum(spikes) < 40
    assert kinds_of(session).count("spike") == sum(spikes)
    resting = [step for step, way in enumerate(moved) if way == 0.0]
    skipped = [step for step, is_spike in enumerate(spikes) if is_spike]
    assert resting == (skipped if then == "skip-step" else [])


def test_norms_that_are_not_finite_do_not_enter() -> None:
    healthy = series(60)
    faulty = [norm for one in healthy for norm in (math.inf, one, math.nan)]
    above = {"percentile": 70, "window": 20}
    (one, moved), (other, among) = (train(above, norms) for norms in (healthy, faulty))
    assert among[1::3] == moved
    (left,), (right,) = (of.state_dict()["rules"]["spikes"]["statistics"] for of in (one, other))
    assert torch.equal(left["kept"], right["kept"])


def test_each_gradient_has_a_window_of_its_own() -> None:
    norms = series(60)
    above = {"percentile": 70, "window": 20}
    _, moved = train(above, norms, per="parameter")
    # Both parameters have the same share of each norm, and so the same percentile of it.
    assert moved == pytest.approx(autoclip(norms, 70, 20), rel=1e-4)


def test_a_resumed_window_is_an_unbroken_one() -> None:
    norms = series(50)
    above = {"percentile": 70, "window": 20}
    _, whole = train(above, norms)
    parts: list[float] = []
    state = None
    for first, last in ((0, 13), (13, 31), (31, 50)):
        session, moved = train(above, norms[first:last], state)
        parts += moved
        file = io.BytesIO()
        torch.save(session.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    assert parts == whole


def test_a_window_of_another_length_restarts_and_is_named() -> None:
    session, _ = train({"percentile": 70, "window": 20}, series(30))
    state = session.state_dict()
    others = rule_file(rule({"percentile": 70, "window": 30}))
    with (
        gradsurgeon.apply(Leaves(), others) as other,
        pytest.warns(GradSurgeonWarning, match="`percentile of 20`.*`percentile of 30`.*restarts"),
    ):
        other.load_state_dict(state)


def test_a_norm_is_a_bound_from_the_first_update_on() -> None:
    norms = [30.0, 5.0, 10.0, 10.5, math.inf, 2.0]
    session, moved = train({"norm": 10}, norms)
    assert moved[:4] == pytest.approx([10.0, 5.0, 10.0, 10.0])
    assert messages(session, "spike") == [
        "over 2 gradients the norm 30 is above 10 (the fixed bound of the rule): cut to 10",
        "over 2 gradients the norm 10.5 is above 10 (the fixed bound of the rule): cut to 10",
    ]
    _, moved = train({"norm": 10}, norms, then="skip-step")
    assert [way > 0 for way in moved] == [False, True, True, False, False, True]
    with pytest.raises(GradientSpikeError, match=r"the norm 30 is above 10 \(the fixed bound"):
        train({"norm": 10}, norms, then="raise")


def test_an_event_quotes_the_percentile_and_how_many_norms_it_is_of() -> None:
    session, _ = train({"percentile": 50, "window": 10}, series(30))
    text = messages(session, "spike")[0]
    assert text == (
        "over 2 gradients the norm 300 is above 2.34 (percentile 50 of the last 10 norms, this one included): cut to 2.34"
    )
