"""Rule files and trainings that hypothesis draws, and the one loop that runs them under rules or by hand."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from oracle import Interpreter, Stopped, matched
from ranks import Json
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import gradsurgeon

Rules = Sequence[Mapping[str, Any]]
Scaler = GradScaler | None


class Net(nn.Module):
    """A branch that may rest, a tied parameter, two that autograd may give one gradient, a wide and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 5)])
        self.shift = nn.Parameter(torch.randn(5))
        self.offset = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(5, 2)
        self.aux = nn.Linear(5, 1)
        self.wide = nn.Parameter(torch.randn(1500, 2))
        self.gain = nn.Parameter(torch.ones(()))
        self.again = self.offset

    def forward(self, x: Tensor, *, rests: bool, poison: tuple[str, float] | None) -> Tensor:
        x = self.enc[1](torch.tanh(self.enc[0](x)))
        x = torch.tanh(x) + (self.shift + self.offset)
        loss: Tensor = self.gain * self.head(x).pow(2).mean() + (self.wide * x.mean()).pow(2).mean()
        rest: Tensor = self.aux(x * self.again).pow(2).mean()
        loss = loss if rests else loss + rest
        return loss if poison is None else loss + (self.get_parameter(poison[0]) * poison[1]).sum()


PATTERNS = (
    "*", "*.bias", "*.weight", "enc.*", "enc.0.*", "enc.{0..1}.bias", "{head,aux}.*", "head.weight", "aux.bias",
    "shift", "offset", "again", "wide", "gain", "*t", "e*.1.*", "re:(enc|head).*bias", "[gw]*", "enc.?.weight",
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a script does.

    Attributes:
        optimizers: by name of the optimizer, one for all parameters or one for `enc.*` and one for the rest.
        every: the second optimizer steps every so many iterations.
        rests: the iterations in which a branch rests.
        poison: iteration, micro-batch and rank in which the gradient of a parameter becomes NaN or infinite.
        hooks: parameter and factor of hooks of the script, from before the rules and from after them.
        observe: the rules only observe.
    """

    optimizers: tuple[str, ...] = ("sgd",)
    every: int = 1
    steps: int = 4
    micro: int = 1
    rests: tuple[int, ...] = ()
    set_to_none: bool = True
    scale: float = 0.0
    unscales: bool = False
    clip: float = 0.0
    poison: tuple[tuple[int, int, int], tuple[str, float]] | None = None
    before: tuple[tuple[str, float], ...] = ()
    after: tuple[tuple[str, float], ...] = ()
    observe: bool = False
    start_step: int = 0
    double: bool = False


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.8, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-2, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, lr=0.02, eps=1e-2, fused=True),
    # Without momentum: torch leaves its buffer uninitialised if a scaler skips the first update.
    "fused-sgd": partial(torch.optim.SGD, lr=0.05, fused=True),
}


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: the final weights, the states of the optimizers, and what was recorded."""

    weights: dict[str, Tensor]
    states: list[dict[str, Tensor]]
    records: dict[tuple[str, str, str], list[tuple[int, float]]]
    captured: dict[tuple[str, str, int, int], Tensor]
    stopped: int | None


@cache
def untrained() -> Net:
    """Return a model to look names up in."""
    return Net()


NUMBER = st.sampled_from([0.05, 0.2, 0.5, 2.0, 5.0])
RAMP = st.fixed_dictionaries(
    {"from": NUMBER, "to": NUMBER, "steps": st.integers(1, 4)},
    optional={
        "shape": st.sampled_from(["linear", "cosine", "sigmoid"]),
        "start_step": st.integers(0, 3),
    },
)
STATS = st.sampled_from(["l2", "l1", "linf", "mean", "min", "max", "zeros", "nonfinite"])
# What words of `cases/drawn_rules.yaml` draw.
WORDS: Mapping[str, st.SearchStrategy[Any]] = {
    "number": NUMBER,
    "below": NUMBER.map(operator.neg),
    "numbers": st.one_of(NUMBER, RAMP),
    "factors": st.one_of(st.sampled_from([-1.0, 0.1, 0.5, 3.0]), RAMP),
    "edits": st.sampled_from(["backward", "step"]),
    "reads": st.sampled_from(["backward", "accumulated", "step"]),
    "rows": st.sampled_from(["1:", ":2", "-3:", "2:4"]),
    # Each has four rows or more.
    "tall": st.sampled_from(["enc.*", "enc.?.weight", "shift", "wide", "enc.0.*"]),
    "stats": st.lists(STATS, min_size=1, max_size=3, unique=True),
}


def drawn(value: Any) -> st.SearchStrategy[Any]:
    """Return what a value of the table draws."""
    if isinstance(value, list):
        return st.sampled_from(value)
    return WORDS[value] if value in WORDS else st.just(value)


def action(row: Json) -> st.SearchStrategy[Json]:
    """Return what a row of the table draws."""
    kept: dict[str, st.SearchStrategy[Any]] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for key, value in row.items():
        place = optional if key.startswith("maybe ") else kept
        place[key.removeprefix("maybe ")] = drawn(value)
    return st.fixed_dictionaries(kept, optional=optional)


@cache  # hypothesis checks each strategy that is made anew
def rule_files(*, scaled: bool = False) -> st.SearchStrategy[list[Json]]:
    names = st.one_of(
        st.sampled_from(PATTERNS),
        st.lists(st.sampled_from(PATTERNS), min_size=2, max_size=3, unique=True),
    )
    table = Path(__file__).parent / "cases" / "drawn_rules.yaml"
    rows = yaml.safe_load(table.read_text(encoding="utf-8"))
    actions = [action(row) for row in rows if not (scaled and row["action"] == "sanitize")]
    steps = st.fixed_dictionaries(
        {},
        optional={"from": st.integers(0, 2), "to": st.integers(3, 6), "every": st.integers(1, 2)},
    )
    where = st.sampled_from(
        [{"ndim": 1}, {"ndim": 2}, {"module_type": "Lin*"}, {"module_type": "Module"}]
    )
    rule = st.builds(
        lambda action, params, more: {"params": params, **action, **more},
        st.one_of(actions),
        names,
        st.fixed_dictionaries({}, optional={"exclude": st.sampled_from(PATTERNS[1:]), "steps": steps, "where": where}),
    )  # fmt: skip
    files = st.lists(rule, min_size=1, max_size=7)
    return files.map(
        lambda rules: [{"id": f"r{i}", "optional": True, **r} for i, r in enumerate(rules)]
    ).filter(lambda rules: any(matched(rule, untrained()) for rule in rules))


@st.composite
def trainings(draw: st.DrawFn, ranks: int = 1) -> tuple[list[Json], Training]:
    def pick(*of: Any) -> Any:
        return draw(st.sampled_from(of))

    names = [name for name, _ in untrained().named_parameters()]
    hooks = st.lists(
        st.tuples(st.sampled_from(names), st.sampled_from([-2.0, 3.0])), max_size=2
    ).map(tuple)
    scale = pick(0.0, 0.0, 0.0, 2.0**10)
    steps, micro = pick(3, 4, 5), pick(1, 1, 2, 3)
    several = draw(st.booleans())
    when = st.tuples(
        st.integers(0, steps - 1), st.integers(0, micro - 1), st.integers(0, ranks - 1)
    )
    what = st.tuples(st.sampled_from(names), st.sampled_from([math.nan, math.inf]))
    training = Training(
        optimizers=tuple(pick(*OPTIMIZERS) for _ in range(1 + several)),
        every=pick(1, 1, 2) if several else 1,
        steps=steps,
        micro=micro,
        rests=tuple(draw(st.lists(st.integers(0, steps - 1), max_size=2, unique=True))),
        set_to_none=draw(st.booleans()),
        scale=scale,
        unscales=bool(scale) and draw(st.booleans()),
        clip=pick(0.0, 0.0, 0.5),
        poison=draw(st.one_of(st.none(), st.tuples(when, what))),
        before=pick((), (), draw(hooks)),
        after=pick((), (), draw(hooks)),
        observe=pick(False, False, False, True),
        start_step=pick(0, 0, 2),
        double=draw(st.booleans()),
    )
    return draw(rule_files(scaled=bool(scale))), training


def by_hand(rules: Rules, training: Training, **more: Any) -> Outcome:
    """Train as the interpreter has it."""

    def attach(model: nn.Module, optimizers: Sequence[Optimizer], scaler: Scaler) -> Interpreter:
        seen, start = training.observe, training.start_step
        bare = getattr(model, "module", model)
        return Interpreter(rules, bare, optimizers, scaler, observe=seen, start_step=start)

    script = Script(training, attach, **more)
    stopped = script.train()
    acted = script.rules
    return Outcome(script.weights, script.states, dict(acted.records), acted.captured, stopped)


def under_rules(rules: Rules, training: Training, **more: Any) -> Outcome:
    """Train under a session."""

    def attach(model: nn.Module, optimizers: Sequence[Optimizer], scaler: Scaler) -> Any:
        return gradsurgeon.apply(
            model,
            {"version": 1, "rules": list(rules)},
            optimizer=optimizers,  # to look for them takes longer than all the rest
            scaler=scaler,
            mode="observe" if training.observe else "act",
            start_step=training.start_step,
        )

    with warnings.catch_warnings(action="ignore", category=gradsurgeon.GradSurgeonWarning):
        script = Script(training, attach, **more)
        stopped = script.train()
        session = script.rules
        records: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        captured: dict[tuple[str, str, int, int], Tensor] = {}
        for rule in rules:
            names = [binding.name for binding in session.plan.of(rule["id"])]
            if rule["action"] == "capture":
                kept = session.captured(rule["id"])
                captured |= {(rule["id"], *key): tensor for key, tensor in kept.items()}
            for stat in rule.get("stats", ["l2"]) if rule["action"] == "norm-log" else ():
                for name in names:
                    with suppress(gradsurgeon.RecordError):
                        records[rule["id"], stat, name] = session.history(
                            name, stat, rule=rule["id"]
                        )
        session.remove()
    return Outcome(
        script.weights,
        script.states,
        {key: rows for key, rows in records.items() if rows},
        captured,
        stopped,
    )


class Script:
    """One training loop, which rules are put on.

    Args:
        training: what it does.
        attach: puts rules on a model, given its optimizers and its scaler.
        wrap: what the model is wrapped in.
        rank: whose batches it takes.
    """

    def __init__(
        self,
        training: Training,
        attach: Callable[[nn.Module, Sequence[Optimizer], Scaler], Any],
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        rank: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self._training = training
        model = Net().double() if training.double else Net()
        self._named = dict(model.named_parameters())
        self._optimizers = _optimizers(training, self._named)
        self._scaler = GradScaler("cpu", init_scale=training.scale) if training.scale else None
        self._hook(training.before)
        self._model = wrap(model)
        self.rules = attach(self._model, self._optimizers, self._scaler)
        self._hook(training.after)
        self._rank = rank
        self._batches = torch.Generator().manual_seed(1 + rank)

    def _hook(self, factors: Iterable[tuple[str, float]]) -> None:
        for name, factor in factors:
            self._named[name].register_hook(partial(torch.mul, factor))  # type: ignore[no-untyped-call]

    def train(self) -> int | None:
        """Train; return the iteration in which a trap has stopped the training."""
        for iteration in range(self._training.steps):
            for micro in range(self._training.micro):
                self._backward(iteration, micro)
                if isinstance(self.rules, Interpreter):
                    self.rules.after_backward()
            try:
                self._update(iteration)
            except (Stopped, gradsurgeon.NonFiniteGradientError):
                return iteration
        return None

    def _backward(self, iteration: int, micro: int) -> None:
        training = self._training
        x = torch.randn(3, 4, generator=self._batches).to(self._named["shift"].dtype)
        at, poison = training.poison or (None, None)
        if at != (iteration, micro, self._rank):
            poison = None
        model: Any = self._model
        adds_up = micro < training.micro - 1 and hasattr(model, "no_sync")
        with model.no_sync() if adds_up else nullcontext():
            loss = model(x, rests=iteration in training.rests, poison=poison)
            (self._scaler.scale(loss) if self._scaler else loss).backward()

    def _update(self, iteration: int) -> None:
        training, scaler = self._training, self._scaler
        for number, optimizer in enumerate(self._optimizers):
            if number and (iteration + 1) % training.every:
                continue
            if scaler and training.unscales:
                scaler.unscale_(optimizer)
            if training.clip and (training.unscales or not scaler):
                params = [param for group in optimizer.param_groups for param in group["params"]]
                nn.utils.clip_grad_norm_(params, training.clip)
            if isinstance(self.rules, Interpreter):
                self.rules.step(optimizer, unscaled=training.unscales)
            elif scaler:
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=training.set_to_none)
        if scaler:
            scaler.update()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self._named.items()}

    @property
    def states(self) -> list[dict[str, Tensor]]:
        return [
            {
                f"{name}.{key}": value.clone()
                for name, param in self._named.items()
                for key, value in optimizer.state.get(param, {}).items()
                if isinstance(value, Tensor)
            }
            for optimizer in self._optimizers
        ]


def _optimizers(training: Training, named: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    groups = [list(named.values())]
    if len(training.optimizers) > 1:
        first = {name for name in named if name.startswith(("enc", "wide"))}
        groups = [
            [named[n] for n in named if n in first],
            [named[n] for n in named if n not in first],
        ]
    return [
        OPTIMIZERS[kind](group) for kind, group in zip(training.optimizers, groups, strict=True)
    ]


def check(found: Outcome, expected: Outcome) -> None:
    """Compare all that two trainings have left."""
    assert found.stopped == expected.stopped
    assert found.records.keys() == expected.records.keys()
    for key, rows in expected.records.items():
        assert [step for step, _ in found.records[key]] == [step for step, _ in rows], key
        values = [torch.tensor([value for _, value in one]) for one in (found.records[key], rows)]
        close(values[0], values[1], key)
    assert found.captured.keys() == expected.captured.keys()
    for call, kept in expected.captured.items():
        close(found.captured[call], kept, call)
    for name, weight in expected.weights.items():
        close(found.weights[name], weight, name)
    for state, other in zip(found.states, expected.states, strict=True):
        assert state.keys() == other.keys()
        for of, value in other.items():
            close(state[of], value, of)


def close(found: Tensor, expected: Tensor, what: object) -> None:
    torch.testing.assert_close(
        found, expected, rtol=2e-4, atol=1e-6, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
