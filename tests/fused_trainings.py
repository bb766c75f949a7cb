"""Random trainings with fused optimizers, each twice: the device decides, or the host waits. On the fused kernels of the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import Json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurgeon
from gradsurgeon.errors import TrapError
from gradsurgeon.runtime import device_policy

STEPS = 12
OPTIMIZERS: dict[str, tuple[type[Any], Json]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
TRAPS: list[Json] = [
    {"id": "nans", "action": "nan-trap"},
    {"id": "heads", "action": "nan-trap", "params": "2.*"},
    {"id": "rule", "action": "spike-trap", "above": {"times": 1.5, "beta": 0.8, "warmup": 2}},
    {
        "id": "each",
        "action": "spike-trap",
        "per": "parameter",
        "above": {"sigmas": 3, "beta": 0.8, "warmup": 3},
    },
    {"id": "window", "action": "spike-trap", "above": {"percentile": 90, "window": 5}},
]
OTHERS: list[Json] = [
    {"id": "clip", "action": "clip-norm", "max_norm": 0.3, "per": "rule"},
    {"id": "clips", "action": "clip-norm", "max_norm": 0.1, "per": "parameter"},
    {"id": "cut", "action": "spike-trap", "above": {"times": 1.1, "warmup": 2}, "then": "clip"},
    {"id": "after", "action": "norm-log", "stats": ["l2", "nonfinite"]},
    {"id": "last", "action": "norm-log", "at": "step"},
    {"id": "weights", "action": "norm-log", "tensor": "value"},
    {"id": "updates", "action": "norm-log", "tensor": "update", "stats": ["ratio"]},
    {"id": "state", "action": "norm-log", "tensor": "state.exp_avg"},
    {"id": "held", "action": "clamp", "tensor": "value", "min": -0.4, "max": 0.4},
    {"id": "slower", "action": "scale", "tensor": "update", "factor": 0.5},
    {"id": "hidden", "action": "freeze", "params": "0.bias"},
    {"id": "learns", "action": "check-update"},
    {"id": "moves", "action": "check-update", "moved": {"min": 0.99, "within": 3}},
    {"id": "loop", "action": "check-loop"},
]
# What happens in a step: to the inputs, the loss, or the gradients.
FACTORS = {"spike": 50.0, "overflow": 1e41}
EVENTS = ("nan input", "infinite input", "nan gradient", "repaired", "spike", "overflow", "rest")


@dataclass
class Case:
    optimizer: str
    rules: list[Json]
    happens: dict[int, str]
    scaler: str = ""
    passes: int = 1
    clears: bool = True
    # On several ranks: the one where something happens to an input or a loss, and whether each pass averages.
    on_rank: int | None = None
    averages_all: bool = True
    # The step before which the session is resumed from its own state.
    resumes: int | None = None
    stops: bool = field(init=False)

    def __post_init__(self) -> None:
        self.stops = any(rule.get("then") == "raise" for rule in self.rules)


def drawn(seed: int) -> Case:
    """Return a training; some have several traps, a scaler, several passes in a step, or gradients that stay."""
    draw = random.Random(seed)
    optimizer = draw.choice([*OPTIMIZERS])
    rules = []
    for trap in draw.sample(TRAPS, draw.choice([1, 1, 2, 3])):
        then = draw.choice(["skip-step"] * 4 + ["raise"])
        rule = {"params": "*", **trap, "then": then}
        if then == "skip-step":
            rule["give_up_after"] = draw.choice([2, 10, "never"])
        rules.append(rule)
    # The others keep no such moment.
    fitting = [rule for rule in OTHERS if rule["id"] != "state" or "adam" in optimizer]
    rules += [{"params": "*", **other} for other in draw.sample(fitting, draw.randrange(4))]
    draw.shuffle(rules)
    happens = {}
    for step in draw.sample(range(STEPS), draw.randrange(5)):
        happens[step] = draw.choice(EVENTS)
    scaler = draw.choice(["", "", "plain", "unscaled"])
    if scaler and optimizer == "momentum":
        # Torch leaves the buffer without numbers if a scaler skips a first step.
        happens = {step: what for step, what in happens.items() if step > 1}
        rules = [rule for rule in rules if rule["action"] != "freeze"]
    return Case(optimizer, rules, happens, scaler, draw.choice([1, 1, 2]), draw.random() < 0.8)


@contextmanager
def decided_on_the_cpu() -> Iterator[None]:
    """Let the fused kernels of the CPU decide, as those of CUDA do."""
    device_policy.DEVICES.add("cpu")
    try:
        yield
    finally:
        device_policy.DEVICES.discard("cpu")


@contextmanager
def waiting() -> Iterator[None]:
    """Let the host wait inside of `decided_on_the_cpu`."""
    device_policy.DEVICES.discard("cpu")
    try:
        yield
    finally:
        device_policy.DEVICES.add("cpu")


def batch(step: int, number: int = 0) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + number))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(case: Case, rank: int | None = None) -> Json:
    """Train as a case says, with a rank by which ranks have batches of their own; return what can be told of it."""
    model: Any = net()
    called = model if rank is None else DistributedDataParallel(model)
    kind, options = OPTIMIZERS[case.optimizer]
    optimizer = kind(model.parameters(), lr=0.05, fused=True, **options)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**6, growth_interval=3, enabled=bool(case.scaler)
    )
    document = {"version": 1, "rules": case.rules}
    session = gradsurgeon.apply(model, document, optimizer=optimizer, scaler=scaler)
    error = ""
    try:
        # Ranks hear of each other's part in an update at the next one.
        steps = STEPS if rank is None else STEPS + 1
        for step in range(steps):
            if step == case.resumes:
                state = session.state_dict()
                session.remove()
                session = gradsurgeon.apply(model, document, optimizer=optimizer, scaler=scaler)
                session.load_state_dict(state)
            one_step(case, step, called, optimizer, scaler, rank=rank)
        state = session.state_dict()
    except TrapError as stop:
        error = f"{type(stop).__name__} {stop.rule} {stop.step}"
        state = session.state_dict()
    found = told(session, case, stopped=bool(error))
    session.remove()
    # A rule that looked at skipped updates alone has learnt nothing.
    for rule in state["rules"].values():
        rule["statistics"] = [part for part in rule["statistics"] if bool(part["kept"].any())]
    weights = [param.detach().clone() for param in model.parameters()]
    kept = [optimizer.state.get(param, {}) for param in model.parameters()]
    found |= {"weights": weights, "kept": kept, "error": error, "rules": state["rules"]}
    return found | {"late": late_in(session)}


def late_in(session: gradsurgeon.Session) -> int:
    """Return of how many events the host heard after their step."""
    return len([event for event in session.events if event.told_at is not None])


def one_step(
    case: Case,
    step: int,
    model: nn.Module,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    *,
    rank: int | None,
) -> None:
    what = case.happens.get(step, "")
    happens_here = rank is None or case.on_rank in (None, rank)
    to_batch = what if happens_here else ""
    if case.clears or not step % 3:
        optimizer.zero_grad()
    for number in range(case.passes):
        x = spoilt(batch(step, number + 10 * (rank or 0)), to_batch, number)
        is_last = number == case.passes - 1
        averages = rank is None or case.averages_all or is_last
        with nullcontext() if averages else model.no_sync():  # type: ignore[operator] # of DDP
            scaler.scale(model(x).square().mean() * FACTORS.get(to_batch, 1.0)).backward()
    if case.scaler == "unscaled" and what != "rest":
        scaler.unscale_(optimizer)
    for param in model.parameters():
        assert param.grad is not None
        if what == "nan gradient" and param.ndim == 1:
            param.grad.view(-1)[0] = float("nan")
        if what == "repaired":
            param.grad.nan_to_num_()
    if what != "rest":
        scaler.step(optimizer)
        if case.scaler:
            scaler.update()


def spoilt(x: Tensor, what: str, number: int) -> Tensor:
    """Return the input of a pass in which something happens."""
    if number == 0 and what in ("nan input", "repaired"):
        x[0, 0] = float("nan")
    if what == "infinite input":
        x[1] = float("inf")
    return x


def told(session: gradsurgeon.Session, case: Case, *, stopped: bool) -> Json:
    """Return events, records and counts; those of a stopped training end one pass later on a device."""
    status = session.status()
    events = []
    for event in session.events:
        certainty = (event.diagnosis or {}).get("certainty", "")
        if certainty and event.kind == "notice":
            # The pass after the trap is told shows the line of a loss.
            continue
        events.append((event.step, event.kind, event.rule, event.name, certainty))
    if stopped:
        trips = [event for event in events if event[1] in ("trap", "spike", "skipped-step")]
        return {"events": sorted(trips)}
    recorded = session.recorded().series
    records = {series.key: [*series.stored()] for series in recorded}
    counts = {name: (one.fired, one.altered, one.last_step) for name, one in status.items()}
    return {"events": sorted(events), "records": records, "counts": counts}


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Return the places at which two results differ; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
        return [] if same else [f"{place}: {one} is not {other}"]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [text for key in one for text in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for n, (a, b) in pairs for text in differences(a, b, f"{place}[{n}]")]
    return [] if one == other else [f"{place}: {one} is not {other}"]
