"""An interpreter of the rule language, with plain hooks and a loop by hand. Nothing here knows gradsurgeon.

It is written from the description of rule files: each rule acts on each gradient by itself, in the order of
the points and, within a point, in the order of the file. The training loop tells it what happens:
`after_backward` once a pass is over, and `step` for each update.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

Rule = Mapping[str, Any]
POINTS = ("backward", "accumulated", "step")
DEFAULTS = {
    "scale": "backward",
    "zero": "backward",
    "sanitize": "backward",
    "clip-norm": "step",
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


def clip(rule: Rule, grads: Sequence[Tensor]) -> list[Tensor]:
    order = float(rule.get("norm_type", 2))
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g.double(), order) for g in grads]), order
    )
    factor = rule["max_norm"] / (norm + 1e-6)
    if not norm.isfinite() or factor >= 1:
        return list(grads)
    return [(g.double() * factor).to(g.dtype) for g in grads]


def edited(rule: Rule, grad: Tensor) -> Tensor:
    """Return a gradient as a rule leaves it that edits each one by itself."""
    edits: Mapping[str, Callable[[], Tensor]] = {
        "clamp": lambda: grad.clamp(rule.get("min"), rule.get("max")),
        "scale": lambda: grad.mul(rule["factor"]),
        "zero": lambda: torch.zeros_like(grad),
        "sanitize": lambda: grad.where(grad.isfinite(), 0.0),
        "clip-norm": lambda: clip(rule, [grad])[0],
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
            rule
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
        frozen = set() if overflow else self._act(grads, stopped=decision != "go")
        if decision == "raise":
            raise Stopped
        if decision == "go":
            hidden = {name: params[name].grad for name in frozen & grads.keys()}
            for name in hidden:
                params[name].grad = None
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            for name, grad in hidden.items():
                params[name].grad = grad
        self.clock[optimizer] += 1

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

    def _act(self, grads: Mapping[str, Tensor], *, stopped: bool) -> set[str]:
        """Run the rules at `step` on the gradients of one optimizer; return the names that are frozen."""
        values = {name: grad.detach().clone() for name, grad in grads.items()}
        due = {name: self._due("step", name) for name in values}
        frozen = {name for name in due if any(rule["action"] == "freeze" for rule in due[name])}
        for rule in self.rules:
            names = [name for name in values if any(rule is one for one in due[name])]
            for name in names:
                self._see(rule, name, values[name])
            if not names or stopped:
                continue
            if rule["action"] == "clip-norm" and rule.get("per") == "rule":
                names = [name for name in names if name not in frozen]
                clipped = clip(rule, [values[name] for name in names]) if names else []
                values.update(zip(names, clipped, strict=True))
            else:
                values.update({name: edited(rule, values[name]) for name in names})
        if self.observe or stopped:
            return set()
        for name, value in values.items():
            self.params[name].grad = value
        return frozen
