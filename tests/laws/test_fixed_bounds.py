"""`spike-trap` with a percentile is AutoClip as the paper has it, and with a norm it acts from the first update on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from laws.test_spike_trap import Leaves, passed, rule, series, trained
from ranks import Json
from running_bounds import AutoClip
from small import attach, fields_of, messages

from gradsurgeon import GradientSpikeError, GradSurgeonWarning
from gradsurgeon.actions._bounds import autoclip as autoclip_bound

WINDOW: Any = {"percentile": 70, "window": 20}


@pytest.mark.parametrize(
    ("percentile", "window", "per"),
    # Both gradients have the same share of each norm, and so the same percentile of it.
    [(99, 1000, "rule"), (90, 120, "rule"), (50, 10, "rule"), (70, 20, "parameter")],
)
def test_a_percentile_is_autoclip_by_hand(percentile: float, window: int, per: str) -> None:
    norms = series(260)
    session, reached = trained({"percentile": percentile, "window": window}, norms, per=per)
    by_hand = AutoClip(percentile, window)
    assert reached == pytest.approx([passed(by_hand, norm) for norm in norms], rel=1e-4)
    spikes = messages(session, "spike")
    assert len(spikes) > 5
    if window == 10:
        assert spikes[0] == (
            "over 2 gradients the norm 1.17 is above 0.979 (percentile 50 of the last 10 values, this one included): cut to 0.979"
        )


@pytest.mark.parametrize("then", ["skip-step", "warn"])
def test_norms_enter_also_where_the_update_is_skipped_so_the_bound_can_rise(then: str) -> None:
    """A bound that learnt only from what it lets through would skip for ever once norms have doubled."""
    norms = [*np.linspace(1, 1.1, 20), *np.linspace(2, 2.2, 20)]
    patience: Json = {"give_up_after": "never"} if then == "skip-step" else {}
    session, _ = trained({"percentile": 80, "window": 10}, norms, then=then, **patience)
    by_hand = AutoClip(80, 10)
    spikes = [step for step, norm in enumerate(norms) if passed(by_hand, norm) < norm]
    assert 5 < len(spikes) < 40
    assert fields_of(session, "step", kind="spike") == spikes
    skipped = fields_of(session, "step", kind="skipped-step")
    assert skipped == (spikes if then == "skip-step" else [])


def test_a_window_of_another_length_restarts_and_is_named() -> None:
    session, _ = trained(WINDOW, series(30))
    with (
        attach(Leaves(5, 6), rule({**WINDOW, "window": 30})) as other,
        pytest.warns(GradSurgeonWarning, match="`percentile of 20`.*`percentile of 30`.*restarts"),
    ):
        other.load_state_dict(session.state_dict())


def test_a_norm_is_a_bound_from_the_first_update_on() -> None:
    norms = [30.0, 5.0, 10.0, 10.5, math.inf, 2.0]
    session, reached = trained({"norm": 10}, norms)
    assert reached[:4] == pytest.approx([10.0, 5.0, 10.0, 10.0])
    assert messages(session, "spike") == [
        "over 2 gradients the norm 30 is above 10 (the fixed bound of the rule): cut to 10",
        "over 2 gradients the norm 10.5 is above 10 (the fixed bound of the rule): cut to 10",
    ]
    session, _ = trained({"norm": 10}, norms, then="skip-step")
    assert fields_of(session, "step", kind="skipped-step") == [0, 3, 4]
    with pytest.raises(GradientSpikeError, match=r"the norm 30 is above 10 \(the fixed bound"):
        trained({"norm": 10}, norms, then="raise")


@pytest.mark.parametrize("percentile", [0.5, 20, 49, 51, 80, 99.5])
def test_a_percentile_is_the_quantile_of_the_norms_that_each_tensor_has(percentile: float) -> None:
    """Tensors that came later, or were not finite, have fewer norms in their windows."""
    window = 30
    bound = autoclip_bound(percentile, window)
    generator = torch.Generator().manual_seed(0)
    kept = torch.zeros(2 + window, 3, dtype=torch.float64)
    by_hand = [AutoClip(percentile, window) for _ in range(3)]
    for step in range(80):
        norms = torch.randn(3, generator=generator).exp().round(decimals=1).double()
        norms[1] = norms[1] if step % 3 else math.inf
        norms[2] = norms[2] if step > 45 else math.nan
        let, kept = bound.advance(kept, norms)
        wanted = [one.passes(norm) for one, norm in zip(by_hand, norms.tolist(), strict=True)]
        assert let.tolist() == pytest.approx(wanted, nan_ok=True)
    assert kept[0].tolist() == [one.number for one in by_hand]
