"""The rules that are measured: every action alone at every point, and what people put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gradsurgeon
from benchmarks.cases import Attached, Case
from benchmarks.workloads import Task
from gradsurgeon.actions import ACTIONS, CheckRule, LossRule

RuleDict = dict[str, Any]

OBSERVE = "observe everything"
CLIP_IDLE = "observe everything, global clip-norm that does not bite"
CLIP_BITES = "observe everything, global clip-norm that bites"
EVERYTHING = "every action at every point"
IDLE = "one rule, out of schedule"
PACK = "the pack debug@1, once its checks rest"
CHECKS = "the four checks, once they rest"
FINGERPRINT = "the pack fingerprint@1"
# Then all checks have settled: the last one looks in each of its first fifty updates.
_REST = 56
ALL_IDLE = "every action at every point, out of schedule"

# What an action cannot do without, and the variants of it that do other work. A new action has to be
# entered here: `alone` says so.
_VARIANTS: Mapping[str, Mapping[str, RuleDict]] = {
    "clamp": {
        "": {"min": -1.0, "max": 1.0},
        "of weights": {"min": -1.0, "max": 1.0, "tensor": "value"},
    },
    "scale": {"": {"factor": 0.5}, "of updates": {"factor": 0.5, "tensor": "update"}},
    "zero": {"": {}},
    "sanitize": {"": {}},
    "perturb": {"": {"eps": 1e-6}},
    "mask": {"": {"rows": ":1"}, "with freeze": {"rows": ":1", "then": "freeze"}},
    "noise": {"": {"std": 1e-6}},
    "centralize": {"": {}},
    "clip-norm": {
        "": {"max_norm": 1e-3, "per": "parameter"},
        "per rule": {"max_norm": 1e-3, "per": "rule"},
        "per rule, does not bite": {"max_norm": 1e9, "per": "rule"},
        "per module": {"max_norm": 1e-3, "per": "module"},
        "per unit, of updates": {"max_norm": 1e-2, "per": "unit", "tensor": "update"},
        "per unit, of weights": {"max_norm": 1e-2, "per": "unit", "relative_to": "weight"},
    },
    "freeze": {"": {}},
    "nan-trap": {"": {}, "skip-step": {"then": "skip-step"}, "warn": {"then": "warn"}},
    "spike-trap": {
        "": {"above": {"sigmas": 2.5, "warmup": 2}},
        "per parameter": {"above": {"times": 1.05, "warmup": 2}, "per": "parameter"},
        "skip-step": {"above": {"sigmas": 1e9, "warmup": 2}, "then": "skip-step"},
        "a percentile": {"above": {"percentile": 99}},
        "a norm": {"above": {"norm": 1e-3}},
        "of updates": {"above": {"norm": 1e-3}, "tensor": "update"},
        "of the loss": {
            "above": {"sigmas": 1e9},
            "tensors": "loss",
            "tensor": "value",
            "then": "skip-step",
        },
    },
    "norm-log": {
        "": {},
        "all statistics": {
            "stats": ["l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]
        },
        "with projections": {"stats": ["l2", "projection"]},
        "per rule": {"per": "rule"},
        "of weights": {"tensor": "value"},
        "of updates": {"tensor": "update", "stats": ["l2", "ratio", "moved"]},
        "of what the optimizer keeps": {"tensor": "state.momentum_buffer"},
    },
    "capture": {"": {}},
    "check-update": {"": {}, "nothing moves": {"moved": {"max": 0}}},
    "check-loop": {"": {}},
    "check-structure": {"": {}},
    "check-ranks": {"": {}},
}
# These leave nothing for the others to do.
_ENDINGS = ("zero", "freeze")
_NEVER = {"from": 10**9}
_TARGETS = {"modules", "tensors"}


def alone() -> Iterator[tuple[str, RuleDict]]:
    """Yield the title and the rule of every action on one loss, at every point that it can stand at."""
    for action, rule in ACTIONS.items():
        if issubclass(rule, LossRule):
            continue  # they need several losses
        if action not in _VARIANTS:
            raise KeyError(f"benchmarks/rule_sets.py does not say how to measure `{action}`")
        for variant, options in _VARIANTS[action].items():
            # Weights are recorded after the update, wherever gradients may be.
            for point in rule.points if rule.takes_at and "tensor" not in options else (None,):
                if point == "backward" and options.get("per") in ("rule", "module"):
                    continue  # only `step` has all gradients at once
                if point == "backward" and options.get("then") == "freeze":
                    continue  # it holds weights during the update
                title = action if point is None else f"{action} at {point}"
                made = {"action": action, **options} | ({} if point is None else {"at": point})
                yield (f"{title}, {variant}" if variant else title), made


def numbered(rules: Sequence[RuleDict]) -> list[RuleDict]:
    """Return rules with ids, on all parameters where they name nothing."""
    return [
        {"id": f"rule-{number}", **({} if _TARGETS & rule.keys() else {"params": "*"}), **rule}
        for number, rule in enumerate(rules)
    ]


def _observing() -> list[RuleDict]:
    return [{"action": "norm-log"}, {"action": "nan-trap"}]


def _global_clip(max_norm: float) -> RuleDict:
    return {"action": "clip-norm", "per": "rule", "max_norm": max_norm}


def together() -> dict[str, list[RuleDict]]:
    """Return what people put together, by title."""
    every = [rule for _, rule in alone() if rule["action"] not in _ENDINGS]
    return {
        OBSERVE: _observing(),
        CLIP_IDLE: [*_observing(), _global_clip(1e9)],
        CLIP_BITES: [*_observing(), _global_clip(1e-3)],
        EVERYTHING: every,
        IDLE: [{"action": "clamp", "at": "step", "max": 1.0, "steps": _NEVER}],
        ALL_IDLE: [{**rule, "steps": _NEVER} for rule in every],
    }


def on_modules() -> dict[str, list[RuleDict]]:
    """Return rules on the tensors of every module, by title."""
    found: dict[str, RuleDict] = {
        f"norm-log on every module's {tensor}": {"action": "norm-log", "tensor": tensor}
        for tensor in ("output", "output.grad", "input.grad")
    }
    found["clamp on every module's output.grad"] = {
        "action": "clamp",
        "tensor": "output.grad",
        "min": -1.0,
        "max": 1.0,
    }
    found["nan-trap on every module's output"] = {"action": "nan-trap", "tensor": "output"}
    return {title: [{"modules": "*", **rule}] for title, rule in found.items()}


def case(
    title: str, rules: Sequence[RuleDict], *, forward: bool = False, single: bool = False
) -> Case:
    """Return rules, of all parameters where they name nothing, as a case; ``single`` is one action alone."""

    def attach(task: Task) -> Attached:
        wanted = {"version": 1, "rules": numbered(rules)}
        session = gradsurgeon.apply(task.model, wanted, optimizer=task.optimizer)
        return Attached(detach=session.remove)

    heavy = title == EVERYTHING
    return Case(title, "rules", attach, forward=forward, alone=single, heavy=heavy)


def resting() -> Iterator[Case]:
    """Yield the checks, and the pack that has them, after the updates in which they look most."""
    checks = [rule for rule in ACTIONS.values() if issubclass(rule, CheckRule)]
    alone = numbered([{"action": rule.model_fields["action"].default} for rule in checks])
    found = {PACK: "gradsurgeon:debug@1", CHECKS: {"version": 1, "rules": alone}}
    yield from (_pack(title, rules, rest=_REST) for title, rules in found.items())


def _pack(title: str, rules: Any, *, rest: int = 0, forward: bool = False) -> Case:
    def attach(task: Task) -> Attached:
        session = gradsurgeon.apply(task.model, rules, optimizer=task.optimizer)
        return Attached(detach=session.remove)

    return Case(title, "rules", attach, rest=rest, forward=forward)


def fingerprint() -> Case:
    return _pack(FINGERPRINT, "gradsurgeon:fingerprint@1", forward=True)


def cases() -> list[Case]:
    """Return all cases of rules."""
    return [
        *(case(title, rules) for title, rules in together().items()),
        *resting(),
        fingerprint(),
        *(case(title, rules, forward=True) for title, rules in on_modules().items()),
        *(case(title, [rule], single=True) for title, rule in alone()),
    ]
