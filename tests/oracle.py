"""An interpreter of the rule language, with plain hooks and a loop by hand. Nothing here knows gradsurgeon.

It is written from the description of rule files: each rule acts on each gradient by itself, in the order of
the points and, within a point, in the order of the file. The training loop tells it what happens:
`after_backward` once a pass is over, and `step` for each update.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

Rule = Mapping[str, Any]
POINTS = ("backward", "accumulated", "step", "updated")
DEFAULTS = {
    "scale": "backward",
    "zero": "backward",
    "sanitize": "backward",
    "clip-norm": "step",
    "mask": "step",
    "spike-trap": "step",
    "freeze": "step",
    "norm-log": "accumulated",
    "capture": "accumulated",
    "nan-trap": "accumulated",
}
STATS = {
    "l2": lambda g: torch.linalg.vector_norm(g.double()),
    "l1": lambda g: g.double().abs().sum(),
    "linf": lambda g: g.abs().max(),
    "mean": lambda g: g.double().mean(),
    "min": lambda g: g.min(),
    "max": lambda g: g.max(),
    "zeros": lambda g: (g == 0).sum(),
    "nonfinite": lambda g: (~g.isfinite()).sum(),
}


class Stopped(Exception):  # noqa: N818 # the trap does what it is there for
    """A trap has stopped the update."""


def point(rule: Rule) -> str:
    if rule.get("tensor") in ("value", "update"):
        return "updated"
    return rule.get("at") or DEFAULTS[rule["action"]]


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    if braces := re.search(r"\{([^{}]*)\}", pattern):
        first, dots, last = braces[1].partition("..")
        words = map(str, range(int(first), int(last) + 1)) if dots else braces[1].split(",")
        head, tail = pattern[: braces.start()], pattern[braces.end() :]
        return any(matches(f"{head}{word}{tail}", name) for word in words)
    return fnmatch.fnmatchcase(name, pattern)


def among(patterns: str | Sequence[str], names: Sequence[str]) -> bool:
    texts = [patterns] if isinstance(patterns, str) else patterns
    return any(matches(text, name) for text in texts for name in names)


def matched(rule: Rule, model: nn.Module) -> list[str]:
    """Return the names of the parameters that a rule matches, each once, under its first name."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(name)
    found = []
    for param, names in aliases.items():
        owner = model.get_submodule(names[0].rpartition(".")[0])
        where = rule.get("where", {})
        fits = where.get("ndim", param.ndim) == param.ndim and any(
            fnmatch.fnmatchcase(kind.__name__, where.get("module_type", "*"))
            for kind in type(owner).__mro__
        )
        if fits and among(rule["params"], names) and not among(rule.get("exclude", ()), names):
            found.append(names[0])
    return found


def is_due(rule: Rule, step: int) -> bool:
    steps = rule.get("steps", {})
    first, last, every = steps.get("from", 0), steps.get("to", step + 1), steps.get("every", 1)
    return step in range(first, last, every)


def in_step(rule: Rule, step: int) -> Rule:
    """Return a rule with the numbers that its ramps have in a step."""
    start = rule.get("steps", {}).get("from", 0)
    numbers = {key: at(value, step, start) for key, value in rule.items() if key in RAMPS}
    return {**rule, **numbers}


RAMPS = ("factor", "max_norm", "min", "max")


def at(number: Any, step: int, start: int) -> float:
    if not isinstance(number, dict):
        return float(number)
    progress = max(0, step - number.get("start_step", start)) / number["steps"]
    if progress >= 1:
        return float(number["to"])
    shapes = {
        "linear": progress,
        "cosine": (1 - math.cos(math.pi * progress)) / 2,
        "sigmoid": 2 / (1 + math.exp(-10 * progress)) - 1,
    }
    share = shapes[number.get("shape", "linear")]
    return float(number["from"] + (number["to"] - number["from"]) * share)


def trains(rule: Rule, tensor: Tensor) -> Tensor:
    """Return which elements of a parameter a mask trains."""
    first, last = (int(end) if end else None for end in rule["rows"].split(":"))
    found = torch.zeros(tensor.shape, dtype=torch.bool)
    found[first:last] = True
    return found


def clip_units(rule: Rule, tensor: Tensor) -> Tensor:
    """Return a tensor whose rows are short enough; a vector is one row."""
    rows = (
        tensor.double().reshape(len(tensor), -1)
        if tensor.dim() > 1
        else tensor.double().reshape(1, -1)
    )
    norms = rows.norm(dim=1, keepdim=True)
    factors = (rule["max_norm"] / norms.clamp(min=1e-6)).clamp(max=1)
    factors = torch.where(norms.isfinite(), factors, 1.0)
    return (rows * factors).to(tensor.dtype).reshape(tensor.shape)


def group_of(rule: Rule, name: str) -> str:
    """Return what a parameter shares its norm with."""
    if rule["per"] == "rule":
        return ""
    if rule["per"] == "module":
        return name.rpartition(".")[0]
    found = re.match(rule["per"].replace(".", r"\.").replace("{n}", r"\d+"), name)
    assert found
    return found[0]


def clip(rule: Rule, grads: Sequence[Tensor]) -> list[Tensor]:
    order = float(rule.get("norm_type", 2))
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g.double(), order) for g in grads]), order
    )
    factor = rule["max_norm"] / (norm + 1e-6)
    if not norm.isfinite() or factor >= 1:
        return list(grads)
    return [(g.double() * factor).to(g.dtype) for g in grads]


def clip_groups(rule: Rule, names: Sequence[str], values: dict[str, Tensor]) -> None:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[group_of(rule, name)].append(name)
    for members in groups.values():
        clipped = clip(rule, [values[name] for name in members])
        values.update(zip(members, clipped, strict=True))


def edited(rule: Rule, grad: Tensor) -> Tensor:
    """Return a gradient as a rule leaves it that edits each one by itself."""
    edits: Mapping[str, Callable[[], Tensor]] = {
        "clamp": lambda: grad.clamp(rule.get("min"), rule.get("max")),
        "scale": lambda: grad.mul(rule["factor"]),
        "zero": lambda: torch.zeros_like(grad),
        "sanitize": lambda: grad.where(grad.isfinite(), 0.0),
        "mask": lambda: grad.where(trains(rule, grad), 0.0),
        "clip-norm": lambda: (
            clip_units(rule, grad) if rule.get("per") == "unit" else clip(rule, [grad])[0]
        ),
    }
    return edits.get(rule["action"], lambda: grad)()


class Interpreter:
    def __init__(
        self,
        rules: Sequence[Rule],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        *,
        observe: bool,
        start_step: int,
    ) -> None:
        self.rules = sorted(rules, key=lambda rule: POINTS.index(point(rule)))
        self.params = dict(model.named_parameters())
        self.matched = {rule["id"]: matched(rule, model) for rule in rules}
        self.scaler, self.observe = scaler, observe
        self.owner = {
            name: optimizer
            for name, param in self.params.items()
            for optimizer in optimizers
            if any(param is one for group in optimizer.param_groups for one in group["params"])
        }
        self.clock = dict.fromkeys(optimizers, start_step)
        # By rule, statistic and name; by rule, name, step and call.
        self.records: defaultdict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        self.captured: dict[tuple[str, str, int, int], Tensor] = {}
        self.tripped: defaultdict[tuple[str, Optimizer], int] = defaultdict(int)
        self._reached: set[str] = set()
        for name, param in self.params.items():
            param.register_hook(partial(self._contributed, name))  # type: ignore[no-untyped-call]

    def _due(self, at: str, name: str) -> list[Rule]:
        step = self.clock[self.owner[name]]
        return [
            in_step(rule, step)
            for rule in self.rules
            if point(rule) == at and name in self.matched[rule["id"]] and is_due(rule, step)
        ]

    def _see(self, rule: Rule, name: str, grad: Tensor, *, last: bool = False) -> None:
        """Record what an observing rule asks for; ``last`` if only the last one of a step stays."""
        step, rule_id = self.clock[self.owner[name]], rule["id"]
        if rule["action"] == "capture":
            call = sum(key[:3] == (rule_id, name, step) for key in self.captured)
            self.captured[rule_id, name, step, call] = grad.detach().clone()
        for stat in rule.get("stats", ["l2"]) if rule["action"] == "norm-log" else ():
            rows = self.records[rule_id, stat, name]
            if last and rows and rows[-1][0] == step:
                rows.pop()
            rows.append((step, float(STATS[stat](grad.detach()))))

    def _contributed(self, name: str, grad: Tensor) -> Tensor | None:
        self._reached.add(name)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        true = grad.detach() / scale
        for rule in self._due("backward", name):
            self._see(rule, name, true)
            out = edited(rule, true)
            # The scaler must see its overflow.
            true = torch.where(true.isfinite(), out, true) if self.scaler else out
        return None if self.observe else true * scale

    def after_backward(self) -> None:
        """Look at what a pass has left, for the optimizers whose parameters it has reached."""
        scale = self.scaler.get_scale() if self.scaler else 1.0
        fed, self._reached = {self.owner[name] for name in self._reached}, set()
        for name, param in self.params.items():
            if param.grad is not None and self.owner[name] in fed:
                for rule in self._due("accumulated", name):
                    if rule["action"] != "nan-trap":
                        self._see(rule, name, param.grad / scale, last=True)

    def step(self, optimizer: Optimizer, *, unscaled: bool) -> None:
        """Make one update, as the rules have it; ``unscaled`` if the script has called `unscale_`.

        Raises:
            Stopped: a trap stops it.
        """
        if self.scaler and not unscaled:
            self.scaler.unscale_(optimizer)
        params = {n: self.params[n] for n, owner in self.owner.items() if owner is optimizer}
        grads = {name: param.grad for name, param in params.items() if param.grad is not None}
        overflow = self.scaler and not all(grad.isfinite().all() for grad in grads.values())
        decision = "go" if overflow else self._decision(optimizer, grads)
        if not overflow:
            frozen = self._act(grads, stopped=decision != "go")
        else:
            # A fused optimizer makes state in a step that the scaler skips, but not of what is frozen.
            frozen = set() if self.observe else self._frozen(grads)
        if decision == "raise":
            raise Stopped
        if decision == "go":
            hidden = {name: params[name].grad for name in frozen & grads.keys()}
            for name in hidden:
                params[name].grad = None
            before = self._kept(optimizer, params)
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            for name, grad in hidden.items():
                params[name].grad = grad
            if not overflow and not self.observe:
                self._after(optimizer, params, before)
        self.clock[optimizer] += 1

    def _kept(
        self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        """Return copies of weights, and of what the optimizer keeps for each element."""
        kept = {}
        for name, param in params.items():
            state = {"": param, **optimizer.state.get(param, {})}
            kept[name] = {
                key: value.detach().clone()
                for key, value in state.items()
                if isinstance(value, Tensor) and value.shape == param.shape
            }
        return kept

    @torch.no_grad()
    def _after(
        self,
        optimizer: Optimizer,
        params: Mapping[str, nn.Parameter],
        before: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Put back what masks hold, and edit weights and updates."""
        for name, param in params.items():
            due = self._due("step", name)
            held = torch.zeros(param.shape, dtype=torch.bool)
            for rule in due:
                if rule["action"] == "mask" and rule.get("then") == "freeze":
                    held |= ~trains(rule, param)
            if held.any():
                for key, value in self._state(optimizer, param):
                    value[held] = before[name].get(key, torch.zeros_like(value))[held]
            if any(rule["action"] == "freeze" for rule in due):
                continue
            for rule in self._due("updated", name):
                old = before[name][""]
                if rule["tensor"] == "value":
                    new = edited(rule, param)
                else:
                    new = old + edited(rule, param - old)
                param.copy_(torch.where(held, param, new))

    def _state(self, optimizer: Optimizer, param: nn.Parameter) -> list[tuple[str, Tensor]]:
        state = optimizer.state.get(param, {}).items()
        kept = [(k, v) for k, v in state if isinstance(v, Tensor) and v.shape == param.shape]
        return [("", param), *kept]

    def _decision(self, optimizer: Optimizer, grads: Mapping[str, Tensor]) -> str:
        decision = "go"
        for rule in self.rules:
            names = grads.keys() & self.matched[rule["id"]]
            if rule["action"] != "nan-trap" or not is_due(rule, self.clock[optimizer]) or not names:
                continue
            row = rule["id"], optimizer
            trips = not all(grads[name].isfinite().all() for name in names)
            self.tripped[row] = self.tripped[row] + 1 if trips else 0
            then = rule.get("then", "raise")
            if self.tripped[row] >= rule.get("give_up_after", 10):
                then = "raise"
            if trips and not self.observe and then != "warn" and decision != "raise":
                decision = then
        return decision

    def _frozen(self, names: Iterable[str]) -> set[str]:
        due = {name: [rule["action"] for rule in self._due("step", name)] for name in names}
        return {name for name, actions in due.items() if "freeze" in actions}

    def _act(self, grads: Mapping[str, Tensor], *, stopped: bool) -> set[str]:
        """Run the rules at `step` on the gradients of one optimizer; return the names that are frozen."""
        values = {name: grad.detach().clone() for name, grad in grads.items()}
        due = {name: self._due("step", name) for name in values}
        frozen = self._frozen(values)
        for written in self.rules:
            names = [
                name for name in values if any(written["id"] == one["id"] for one in due[name])
            ]
            if not names:
                continue
            rule = in_step(written, self.clock[self.owner[names[0]]])
            for name in names:
                self._see(rule, name, values[name])
            if stopped:
                continue
            if rule.get("per", "parameter") not in ("parameter", "unit"):
                clip_groups(rule, [name for name in names if name not in frozen], values)
            else:
                values.update({name: edited(rule, values[name]) for name in names})
        if self.observe or stopped:
            return set()
        for name, value in values.items():
            self.params[name].grad = value
        return frozen
