"""A running bound that cuts every update and cannot follow says so, once; one that follows says nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import gradsurgeon

ZCLIP, ADAGC = {"sigmas": 2.5}, {"times": 1.05}


def told(
    above: dict[str, float], series: Iterable[Sequence[float]], **options: Any
) -> list[gradsurgeon.Event]:
    """Train with gradients of such norms, one for each parameter; return the notices."""
    series = list(series)
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in series[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, **options}
    with gradsurgeon.apply(model, {"version": 1, "rules": [rule]}, optimizer=optimizer) as session:
        for norms in series:
            for param, norm in zip(model, norms, strict=True):
                param.grad = torch.full((1,), norm)
            optimizer.step()
        return [event for event in session.events if event.kind == "notice"]


def test_a_bound_without_a_variance_that_cuts_for_ever() -> None:
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match="does not rise to get to 1.2") as seen:
        (notice,) = told(ZCLIP, [[1.0]] * 50 + [[1.2]] * 400)
    assert notice.step == 50 + 99
    assert "in the last 100 updates; the bound is 1 by now" in notice.message
    assert "raise `sigmas` or lower `beta`" in notice.message
    assert len(seen) == 1


def test_a_bound_that_has_begun_at_a_tiny_norm() -> None:
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match="raise `times` or lower `beta`"):
        (notice,) = told(ADAGC, [[1e-9 if step == 50 else 1.0] for step in range(400)])
    # It grows by a thousandth in an update.
    missing = math.log(1e9 / 1.05 / (1 + 0.02 * 0.05) ** 99) / math.log(1.001)
    assert f"needs {missing:,.0f} more to get to 1," in notice.message


@pytest.mark.parametrize("then", ["clip", "warn"])
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_of_several_it_is_named(then: str) -> None:
    series = [[1 + 0.1 * math.sin(step), 1.0 if step < 50 else 1.2] for step in range(200)]
    (notice,) = told(ZCLIP, series, per="parameter", then=then)
    assert "the norm of 1 was above the bound" in notice.message


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("then", ["clip", "warn"])
def test_one_norm_below_the_bound_begins_the_row_anew(then: str) -> None:
    steps = [1.2 if step % 100 else 0.5 for step in range(400)]
    assert not told(ZCLIP, [[1.0]] * 50 + [[norm] for norm in steps], then=then)
    assert told(ZCLIP, [[1.0]] * 50 + [[norm] for norm in steps] + [[1e3]] * 101, then=then)


def healthy(seed: int, drift: float, number: int) -> list[list[float]]:
    """Return series that drift by a factor, with the noise of small batches, one wide and one in waves."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(number, 3, generator=generator) * torch.tensor([0.2, 0.5, 0.2])
    for step in range(1, number):
        noise[step, 2] = 0.9 * noise[step - 1, 2] + math.sqrt(1 - 0.81) * noise[step, 2]
    return [
        [drift ** (step / number) * math.exp(x) for x in row]
        for step, row in enumerate(noise.tolist())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("above", [ZCLIP, ADAGC], ids=["sigmas", "times"])
@pytest.mark.parametrize("drift", [0.1, 1.0, 10.0])
def test_of_healthy_series_nothing_is_said(above: dict[str, float], drift: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradsurgeon.GradSurgeonWarning)
        seeds = [healthy(seed, drift, 2000) for seed in range(10)]
        series = [list(chain.from_iterable(norms)) for norms in zip(*seeds, strict=True)]
        assert not told(above, series, per="parameter")


@pytest.mark.parametrize("then", ["clip", "skip-step"])
def test_norms_below_the_slack_of_a_bound(then: str) -> None:
    series = [[1e-9 * (1 + 0.1 * math.sin(step))] for step in range(120)]
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match=r"that is not 2\.5e-06 above it"):
        (notice,) = told(ZCLIP, [*series, [1e-7]], then=then)
    assert "the usual norm is 9.99e-10" in notice.message
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradsurgeon.GradSurgeonWarning)
        assert not told(ZCLIP, [[1e3 * norm for norm in norms] for norms in series], then=then)
        assert not told({"times": 1.5}, series, then=then)
