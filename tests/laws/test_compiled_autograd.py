"""Compiled autograd: backward as a graph of its own, which calls hooks but not what ends a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from models import data, same
from pairs import slow
from ranks import Json
from small import attach, fields_of, hold_rows, kinds_of, rule_file, sgd, steps_of, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError, RuleStatus

# As in the tests of rules on modules: torch warns about its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.no_cover,  # which would trace the compiler as well
]

WAYS = ["around backward", pytest.param("by configuration", marks=pytest.mark.slow)]
STEPS = 3
POINTS = ["backward", "accumulated", "step"]
BOUNDS = {"output.grad": (-0.03, 0.03), "input.grad": (-0.01, 0.01)}
BOUNDS |= {"input": (-0.7, 0.7), "output": (-0.4, 0.4)}
SIDES = ["output.grad", "input.grad", "output", "input"]


def rules() -> Iterator[Json]:
    yield {"id": "clamp-backward", "action": "clamp", "at": "backward", "params": "*", "max": 0.02}
    yield {"id": "clip-step", "action": "clip-norm", "params": "*", "max_norm": 0.05, "per": "rule"}
    for point in POINTS:
        yield {"id": f"norm-log-{point}", "action": "norm-log", "params": "*", "at": point}
        yield {"id": f"capture-{point}", "action": "capture", "params": "*", "at": point}
    yield {"id": "nan-trap-params", "action": "nan-trap", "params": "*"}
    above = {"times": 1.01, "warmup": 2}
    yield {"id": "spike-trap", "action": "spike-trap", "params": "*", "above": above}
    for side in SIDES:
        label, site = side.replace(".", "-"), {"modules": "1", "tensor": side}
        low, high = BOUNDS[side]
        yield {"id": f"clamp-{label}", "action": "clamp", **site, "min": low, "max": high}
        yield {"id": f"norm-log-{label}", "action": "norm-log", **site}
        yield {"id": f"nan-trap-{label}", "action": "nan-trap", **site}


IDS = [one["id"] for one in rules()]


def made() -> nn.Sequential:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))


def small() -> nn.Module:
    return nn.Sequential(*list(made())[:2])


def enabled(**options: Any) -> Any:
    compiler = torch.compile(backend="eager", **options)
    return torch._dynamo.compiled_autograd._enable(compiler)


def backward(way: str) -> Callable[[Tensor], None]:
    if way == "around backward":

        def run_backward(loss: Tensor) -> None:
            with enabled():
                loss.backward()

        return run_backward
    if way == "by configuration":

        @torch.compile(backend="eager")
        def compiled_backward(loss: Tensor) -> None:
            loss.backward()

        return compiled_backward
    return lambda loss: loss.backward()


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    torch._dynamo.config.compiled_autograd = True
    yield
    torch._dynamo.config.compiled_autograd = False


def captures() -> int:
    return int(torch._dynamo.utils.counters["compiled_autograd"]["captures"])


@dataclass
class Outcome:
    params: list[Tensor]
    status: dict[str, RuleStatus]
    norms: dict[str, dict[str, list[tuple[int, float]]]]
    captured: dict[str, dict[tuple[str, int, int], Tensor]]
    compiled: list[tuple[int, int]]
    events: list[str]


@cache
def run(way: str, micro: int = 1, kept: str = "") -> Outcome:
    own = rule_file(*[one for one in rules() if one["id"].endswith(kept)])
    model = made()
    optimizer = sgd(model, 0.3)
    go = backward(way)
    compiled = []
    with gradsurgeon.apply(model, own) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            for batch in range(micro):
                go(model(data(10 * step + batch, 5, 4)).square().mean())
            # What is recorded after backward must not have been clipped.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            compiled.append((captures(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        ids = list(session.status())
        logged = [one for one in ids if one.startswith("norm-log")]
        copied = [one for one in ids if one.startswith("capture")]
        params = [name for name, _ in model.named_parameters()]
        return Outcome(
            weights_of(model),
            session.status(),
            {
                one: {
                    name: session.history(name, rule=one)
                    for name in (params if one.split("-")[-1] in POINTS else ["1"])
                }
                for one in logged
            },
            {one: session.captured(one) for one in copied},
            compiled,
            fields_of(session, "message"),
        )


@pytest.mark.cell("compiled autograd", "backward", "accumulated", "step", "modules")
@pytest.mark.parametrize("rule", [*IDS[::4], *slow(*(i for n, i in enumerate(IDS) if n % 4))])
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_acts_as_without_it(way: str, rule: str) -> None:
    wanted, found = run("eager"), run(way)
    assert wanted.status[rule].fired > 0
    assert found.status[rule].fired == wanted.status[rule].fired
    assert found.status[rule].changed == wanted.status[rule].changed
    for name, rows in wanted.norms.get(rule, {}).items():
        hold_rows(found.norms[rule][name], rows)
    for place, tensor in wanted.captured.get(rule, {}).items():
        assert torch.allclose(found.captured[rule][place], tensor, atol=1e-6)
    assert found.captured.get(rule, {}).keys() == wanted.captured.get(rule, {}).keys()


@pytest.mark.parametrize("way", WAYS)
def test_training_ends_where_it_does_without_it(way: str) -> None:
    wanted, found = run("eager"), run(way)
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-06)
    (spike,) = wanted.events
    assert found.events == [spike]
    assert "is above" in spike


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_from_step_to_step(way: str) -> None:
    found = run(way)
    assert found.compiled[0] == found.compiled[-1]
    # It was compiled autograd that ran, and once.
    assert found.compiled[0][0] == 1
    assert run("eager").compiled[-1] == (0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rule clamp-backward.*bounds the contribution")
@pytest.mark.parametrize("point", POINTS)
def test_micro_batches(point: str) -> None:
    wanted, found = run("eager", 2, point), run("around backward", 2, point)
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-06)
    for rule, by_name in wanted.norms.items():
        for name, rows in by_name.items():
            hold_rows(found.norms[rule][name], rows)
    assert found.events == wanted.events


TRAPS = [one for one in IDS if one.startswith("nan-trap")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap", "then"), [*((trap, "raise") for trap in TRAPS), ("nan-trap-params", "skip-step")]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_trap_keeps_the_weights(way: str, trap: str, then: str) -> None:
    model, go = small(), backward(way)
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    own = [{**one, "then": then} for one in rules() if one["id"] == trap]
    with attach(model, *own) as session:
        go(model(data(0, 5, 4) * float("nan")).square().sum())
        if then == "raise":
            with pytest.raises(NonFiniteGradientError) as caught:
                optimizer.step()
            assert caught.value.rule == trap
        else:
            optimizer.step()
            assert kinds_of(session) == ["trap", "skipped-step"]
    assert same(weights_of(model), before)


@pytest.mark.slow
def test_the_border_is_in_the_order_of_backward() -> None:
    heads = []
    for way in ["eager", "around backward"]:
        model = made()
        optimizer = sgd(model, 0.3)
        own = rule_file({"id": "trap", "action": "nan-trap", "params": "*"})
        with torch.no_grad():
            next(model.parameters())[0, 0] = float("nan")
        with gradsurgeon.apply(model, own):
            backward(way)(model(data(0, 5, 4))[:, :1].sum())
            with pytest.raises(NonFiniteGradientError) as caught:
                optimizer.step()
        heads.append(str(caught.value))
    assert heads[0] == heads[1]


@pytest.mark.slow
def test_weights_updated_by_hand() -> None:
    found = []
    for way in ["eager", "around backward"]:
        model, go = small(), backward(way)
        rule = {"id": "it", "action": "scale", "factor": 0.5, "params": "*", "at": "step"}
        with attach(model, rule) as session:
            for step in range(3):
                go(model(data(step, 5, 4)).square().mean())
                with torch.no_grad():
                    for param in model.parameters():
                        assert param.grad is not None
                        param.sub_(param.grad)
                        param.grad = None
            assert session.step == 3
        found.append(weights_of(model))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


@pytest.mark.slow
def test_a_parameter_that_gets_no_gradient_is_not_waited_for() -> None:
    torch._dynamo.reset()
    model = Spare()
    rule = {"id": "norms", "action": "norm-log", "params": "*"}
    with attach(model, rule, optimizer=[]) as session:
        with enabled():
            model(data(0, 5, 4)).sum().backward()
        # Before anything else happens the pass is over.
        assert steps_of(session, "used.weight") == [0]


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.slow
def test_a_gradient_that_is_none_does_not_keep_the_others() -> None:
    torch._dynamo.reset()
    model = Spare()
    optimizer = sgd(model, 0.3)
    rule = {"id": "norms", "action": "norm-log", "params": "*"}
    with attach(model, rule) as session:
        for step in range(2):
            optimizer.zero_grad()
            loss = Nothing.apply(model(data(step, 5, 4)), model.spare.weight).sum()
            with enabled():
                loss.backward()
            optimizer.step()
        assert steps_of(session, "used.weight") == [0, 1]


@pytest.mark.slow
def test_autograd_grad_is_left_alone() -> None:
    model = made()
    rule = {"id": "it", "action": "zero", "params": "*", "at": "backward"}
    with attach(model, rule) as session:
        loss = model(data(0, 5, 4)).square().mean()
        with enabled():
            grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(grad.any() for grad in grads)
        assert session.status()["it"].fired == 0
        assert kinds_of(session) == ["notice"]
        session.status()
        session.pause()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["clamp-backward", "clamp-output-grad"])
def test_one_whole_graph_is_refused_by_torch(rule: str) -> None:
    text = "gradsurgeon acts here"
    model = made()
    own = [one for one in rules() if one["id"] == rule]
    with attach(model, *own) as session:
        loss = model(data(0, 5, 4)).square().mean()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text), enabled(fullgraph=True):
            loss.backward()
        session.pause()


@pytest.mark.slow
def test_a_pass_that_was_cut_short_is_none() -> None:
    def stop(_grad: Tensor) -> None:
        raise ValueError("stop")

    steps = []
    for way in ["eager", "around backward"]:
        model, go = made(), backward(way)
        rule = {"id": "norms", "action": "norm-log", "params": "*"}
        with attach(model, rule) as session:
            # Backward reaches it last.
            handle = next(model.parameters()).register_hook(stop)
            with pytest.raises(ValueError, match="stop"):
                go(model(data(0, 5, 4)).square().mean())
            handle.remove()
            model.zero_grad()
            go(model(data(1, 5, 4)).square().mean())
            steps.append((session.step, steps_of(session, "2.weight")))
    assert steps == [(1, [0]), (1, [0])]
