"""Plan -> programs: what each hook of a session has to do, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsurgeon.actions import Rule
from gradsurgeon.planning import Plan


@dataclass(frozen=True, slots=True)
class Stage:
    """One rule on the tensors it bound, by their index in `Program.names`."""

    rule: Rule
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a session does, sorted by the moment at which it happens.

    Attributes:
        names: canonical names of the tensors that any rule touches, in model order.
        per_tensor: tensor index to its rules at `backward` in file order; one tensor hook each.
        after_backward: rules that look once a backward pass has finished. The traps are among them:
            they look there and decide at the step.
        at_step: rules that act right before an update, in file order.
    """

    names: tuple[str, ...]
    per_tensor: dict[int, tuple[Rule, ...]]
    after_backward: tuple[Stage, ...]
    at_step: tuple[Stage, ...]

    @property
    def traps(self) -> tuple[Stage, ...]:
        """The stages that can stop an update."""
        return tuple(stage for stage in self.after_backward if stage.rule.role == "trap")

    @property
    def step_edits(self) -> tuple[Stage, ...]:
        """The stages that change final gradients."""
        return tuple(stage for stage in self.at_step if stage.rule.role == "edit")


def compile_plan(plan: Plan) -> Program:
    """Return the program of a plan: one hook per tensor, one look per pass, one visit per step."""
    names = tuple(plan.chains)
    index = {name: number for number, name in enumerate(names)}
    per_tensor: dict[int, list[Rule]] = {}
    stages: dict[str, list[Stage]] = {"accumulated": [], "step": []}
    for rule in plan.rules.rules:
        tensors = tuple(index[binding.name] for binding in plan.of(rule.id))
        if rule.point == "backward":
            for tensor in tensors:
                per_tensor.setdefault(tensor, []).append(rule)
        elif tensors:
            stages[rule.point].append(Stage(rule, tensors))
    return Program(
        names,
        {tensor: tuple(rules) for tensor, rules in sorted(per_tensor.items())},
        tuple(stages["accumulated"]),
        tuple(stages["step"]),
    )


def union(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the tensors of all stages, each once, in model order."""
    return tuple(sorted({tensor for stage in stages for tensor in stage.tensors}))
