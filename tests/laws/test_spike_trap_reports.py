"""A report of `spike-trap` names an origin only where the order of the backward pass shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgeon

GUARD = {"id": "guard", "action": "nan-trap", "params": "*"}


def spike_trap(**options: Any) -> dict[str, Any]:
    above = {"sigmas": 50.0, "warmup": 20}
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, "then": "raise"}
    return {**rule, **options}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])


def _ten_thousandfold(_module: nn.Module, into: Any, _out: Any) -> Any:
    return (into[0] * 1e4,)


def _tenfold(_module: nn.Module, into: Any, _out: Any) -> Any:
    return (into[0] * 10.0,)


def stopped(
    where: str,
    *,
    guarded: bool = False,
    parts: int = 1,
    optimizers: tuple[str, ...] = ("01234",),
    compiled: bool = False,
    **options: Any,
) -> list[str]:
    """Train layers, each with one of the optimizers, until a gradient is 10,000 times the usual; return the report.

    It grows in the backward pass of layer 2, or comes with the loss.
    """
    model = layers()
    steppers = [
        torch.optim.SGD([p for place in owned for p in model[int(place)].parameters()], lr=1e-3)
        for owned in optimizers
    ]
    called = torch.compile(model, backend="aot_eager") if compiled else model
    rules = {"version": 1, "rules": [*([GUARD] if guarded else []), spike_trap(**options)]}
    with gradsurgeon.apply(model, rules, optimizer=steppers):
        for step in range(31):
            if (step, where) == (30, "layer 2"):
                model[2].register_full_backward_hook(_ten_thousandfold)
            model.zero_grad()
            for part in torch.randn(64, 8).chunk(parts):
                loss = (called(part) - part).square().mean()
                (loss * (1e4 if (step, where) == (30, "loss") else 1)).backward()
            if step == 30:
                with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
                    for stepper in steppers:
                        stepper.step()
                return str(caught.value).splitlines()
            for stepper in steppers:
                stepper.step()
    raise AssertionError


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("per", ["rule", "parameter"])
def test_with_or_without_a_nan_trap_it_goes_by_the_order_of_backward(
    guarded: bool, parts: int, per: str
) -> None:
    line = stopped("layer 2", guarded=guarded, parts=parts, per=per)[-1]
    assert line.startswith("in the order of backward the spike begins at 1.0.bias (")
    assert "; 2.0.weight (" in line
    line = stopped("loss", guarded=guarded, parts=parts, per=per)[-1]
    assert line.startswith("the first gradient of the backward pass is large already, 4.0.bias")
    assert "the spike came with the loss" in line


def test_the_order_is_not_that_of_the_model() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "cab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run(boost: float) -> Tensor:
        x = model["a"](torch.randn(64, 8))
        x = x + (boost - 1) * (x - x.detach())
        out: Tensor = model["c"](model["b"](x)).square().mean()
        return out

    with gradsurgeon.apply(model, {"version": 1, "rules": [spike_trap()]}, optimizer=optimizer):
        for step in range(31):
            model.zero_grad()
            run(1e4 if step == 30 else 1.0).backward()
            if step < 30:
                optimizer.step()
        with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
            optimizer.step()
    line = str(caught.value).splitlines()[-1]
    assert "in the order of backward the spike begins at a.weight" in line
    assert "; b.weight" in line


@pytest.mark.parametrize("guarded", [False, True])
def test_of_two_optimizers_the_one_does_not_speak_of_what_came_before(guarded: bool) -> None:
    for where in ("layer 2", "loss"):
        line = stopped(where, guarded=guarded, optimizers=("01", "234"))[-1]
        assert "of the gradients that the rule judges here, the first" in line
        assert "large already, 1.0.bias" in line
        assert "4.0.bias, 4.0.weight, 3.0.bias and 3 more" in line
        assert "came with the loss" not in line
    # The other one has the first gradient of the pass.
    assert "came with the loss" in stopped("loss", guarded=guarded, optimizers=("234", "01"))[-1]


def test_what_comes_between_is_named_where_another_optimizer_has_it() -> None:
    line = stopped("layer 2", optimizers=("014", "23"))[-1]
    assert "the spike begins at 1.0.bias" in line
    assert "; 4.0.weight (" in line
    assert "which the rule does not judge here (3.0.bias, 3.0.weight, 2.0.bias and 1 more)" in line


def test_parameters_of_other_models_come_before_as_well() -> None:
    model, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(model, {"version": 1, "rules": [spike_trap()]}, optimizer=optimizer):
        for step in range(31):
            model.zero_grad()
            (
                other(model(torch.randn(64, 8))).square().mean() * (1e4 if step == 30 else 1)
            ).backward()
            if step < 30:
                optimizer.step()
        with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
            optimizer.step()
    line = str(caught.value).splitlines()[-1]
    assert "tensors of no layer of this model" in line
    assert "came with the loss" not in line


@pytest.mark.slow
def test_of_a_compiled_model_no_order_is_known() -> None:
    for guarded in (False, True):
        line = stopped("loss", compiled=True, guarded=guarded)[-1]
        assert "the order of backward is not known" in line
        assert "came with the loss" not in line


def test_passes_that_reach_different_parameters_have_no_common_order() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(model, {"version": 1, "rules": [spike_trap()]}, optimizer=optimizer):
        for step in range(31):
            model.zero_grad()
            x = torch.randn(64, 8)
            # A loss of its own in the middle of the model.
            (model[:3](x).square().mean() * (1e4 if step == 30 else 1)).backward()
            (model(x) - x).square().mean().backward()
            if step < 30:
                optimizer.step()
        with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
            optimizer.step()
    line = str(caught.value).splitlines()[-1]
    assert "the order of backward is not known" in line
    assert "these norms do not show where the spike began" in line


def test_the_event_of_a_clip_names_what_carries_most() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(
        model, {"version": 1, "rules": [spike_trap(then="clip")]}, optimizer=optimizer
    ) as session:
        for step in range(31):
            for name, param in model.named_parameters():
                size = 1e3 if (step, name) == (30, "3.0.weight") else 1.0
                param.grad = torch.full_like(param, size)
            optimizer.step()
    (spike,) = [event for event in session.events if event.kind == "spike"]
    assert spike.name == "3.0.weight"
    assert "3.0.weight carries 100% of its square" in spike.message


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_a_rebuilt_optimizer_goes_on_with_the_row_of_trips() -> None:
    param = nn.Linear(4, 1, bias=False)
    rule = spike_trap(then="skip-step", give_up_after=4)
    with gradsurgeon.apply(param, {"version": 1, "rules": [rule]}) as session:
        for step in range(33):
            optimizer = torch.optim.SGD(param.parameters(), lr=0.0)
            param.weight.grad = torch.randn(1, 4) * (1e6 if step >= 30 else 1)
            optimizer.step()
        assert session.state_dict()["in_a_row"] == {"spikes": {"weight": 3}}
        param.weight.grad = torch.randn(1, 4) * 1e6
        with pytest.raises(gradsurgeon.GradientSpikeError, match="tripped 4 times in a row"):
            torch.optim.SGD(param.parameters(), lr=0.0).step()


@pytest.mark.parametrize("per", ["rule", "parameter"])
@pytest.mark.parametrize("loss", [1.0, 3.0])
def test_a_layer_is_blamed_where_the_loss_is_a_little_larger_as_well(loss: float, per: str) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"version": 1, "rules": [spike_trap(per=per)]}
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        for step in range(31):
            if step == 30:
                model[2].register_full_backward_hook(_ten_thousandfold)
            model.zero_grad()
            x = torch.randn(64, 8)
            ((model(x) - x).square().mean() * (loss if step == 30 else 1.0)).backward()
            if step < 30:
                optimizer.step()
        with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
            optimizer.step()
    line = str(caught.value).splitlines()[-1]
    assert line.startswith("in the order of backward the spike begins at 1.0.bias (")
    assert "the loss" not in line


def test_no_origin_is_named_where_the_loss_explains_a_part_of_the_growth() -> None:
    """Each layer makes gradients ten times as large as before."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradsurgeon.apply(model, {"version": 1, "rules": [spike_trap()]}, optimizer=optimizer):
        for step in range(31):
            if step == 30:
                for layer in list(model.children())[1:]:
                    layer.register_full_backward_hook(_tenfold)
            model.zero_grad()
            x = torch.randn(64, 8)
            ((model(x) - x).square().mean() * (2.0 if step == 30 else 1.0)).backward()
            if step < 30:
                optimizer.step()
        with pytest.raises(gradsurgeon.GradientSpikeError) as caught:
            optimizer.step()
    text = str(caught.value)
    assert "the spike came with the loss" not in text
    assert "look at this layer" not in text


def test_by_smallest_norms_no_origin_is_named() -> None:
    """What a bound by `times` starts from is the smallest norm of the warm-up, and no usual one."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    above = {"times": 1.5, "warmup": 10}
    rules = {"version": 1, "rules": [spike_trap(per="parameter", above=above, then="warn")]}
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(31):
                model.zero_grad()
                x = torch.randn(64, 8)
                ((model(x) - x).square().mean() * (1e4 if step == 30 else 1.0)).backward()
                optimizer.step()
        spikes = [event.message for event in session.events if event.kind == "spike"]
    assert spikes
    assert not [
        text for text in spikes if "came with the loss" in text or "the spike begins at" in text
    ]


# -------------------------------------------------------------------------------------------------
# A running bound that cuts every update and cannot follow says so, once; one that follows says nothing.
# -------------------------------------------------------------------------------------------------


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
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match="is now 1 and does not rise") as seen:
        (notice,) = told(ZCLIP, [[1.0]] * 50 + [[1.2]] * 400)
    assert notice.step == 50 + 99
    assert "in the last 100 updates: the least of these norms is 1.2, the bound" in notice.message
    assert "raise `sigmas` or lower `beta`" in notice.message
    assert len(seen) == 1


def test_a_bound_that_has_begun_at_a_tiny_norm() -> None:
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match="raise `times` or lower `beta`"):
        (notice,) = told(ADAGC, [[1e-9 if step == 50 else 1.0] for step in range(400)])
    # It grows by a thousandth in an update.
    missing = math.log(1e9 / 1.05 / (1 + 0.02 * 0.05) ** 99) / math.log(1.001)
    assert "the least of these norms is 1, " in notice.message
    assert f"catches up in {missing:,.0f} updates" in notice.message


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
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match=r"only a norm 2\.5e-06 above it"):
        (notice,) = told(ZCLIP, [*series, [1e-7]], then=then)
    assert "the usual norm is 9.99e-10" in notice.message
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradsurgeon.GradSurgeonWarning)
        assert not told(ZCLIP, [[1e3 * norm for norm in norms] for norms in series], then=then)
        assert not told({"times": 1.5}, series, then=then)
