"""Plan -> program: all work of a session, sorted by moment. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradsurgeon.actions import CheckRule, FreezeRule, LossRule, Rule, TrapRule, in_order
from gradsurgeon.language.planning import ROOT, Plan


@dataclass(frozen=True, slots=True)
class Stage:
    rule: Rule
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleProgram:
    name: str
    on_input: tuple[Rule, ...]
    on_output: tuple[Rule, ...]
    # On the gradients that this module and others send back to their common input.
    on_shared: tuple[LossRule, ...] = ()


@dataclass(frozen=True)
class Program:
    """All work of a session, sorted by moment."""

    # All parameters. Even without rules on them, their optimizer counts the steps.
    names: tuple[str, ...]
    armed: tuple[int, ...] = ()  # the parameters with rules
    # On the gradients of single losses, before all other rules.
    of_losses: tuple[Stage, ...] = ()
    in_backward: tuple[Stage, ...] = ()
    # Includes the traps, which look here and decide at the step.
    after_backward: tuple[Stage, ...] = ()
    at_step: tuple[Stage, ...] = ()
    # After updates: records of weights, and of what updates changed.
    of_weights: tuple[Stage, ...] = ()
    checks: tuple[Stage, ...] = ()
    # `in_backward` by parameter: one tensor hook each.
    per_tensor: dict[int, tuple[Rule, ...]] = field(default_factory=dict)
    # Parameter to the rules that edit the contribution of one pass, rules on losses first.
    contributing: dict[int, tuple[Rule, ...]] = field(default_factory=dict)
    modules: tuple[ModuleProgram, ...] = ()
    tags: tuple[Rule, ...] = ()

    @property
    def watched(self) -> Sequence[int]:
        return self.armed or range(len(self.names))

    @cached_property
    def traps(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.after_backward if isinstance(stage.rule, TrapRule))

    @cached_property
    def site_rules(self) -> list[tuple[Rule, str]]:
        found: dict[str, tuple[Rule, str]] = {}
        for module in self.modules:
            for rule in (*module.on_input, *module.on_output, *module.on_shared):
                found.setdefault(rule.id, (rule, module.name))
        return [*found.values(), *((rule, ROOT) for rule in self.tags)]

    @property
    def freezes(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.at_step if isinstance(stage.rule, FreezeRule))


def compile_plan(plan: Plan) -> Program:
    names = tuple(param.name for param in plan.manifest.params)
    index_of = {name: number for number, name in enumerate(names)}
    rules = in_order(plan.rules.rules)
    of_losses: list[Stage] = []
    of_weights: list[Stage] = []
    checks: list[Stage] = []
    stages: dict[str, list[Stage]] = {"backward": [], "accumulated": [], "step": []}
    for rule in rules:
        if rule.target == "params" and (bindings := plan.of(rule.id)):
            stage = Stage(rule, tuple(index_of[binding.name] for binding in bindings))
            if isinstance(rule, LossRule):
                of_losses.append(stage)
            elif isinstance(rule, CheckRule):
                checks.append(stage)
            else:
                (stages[rule.point] if rule.ref.grad else of_weights).append(stage)
    in_backward, after_backward, at_step = stages.values()
    every = (*of_losses, *checks, *in_backward, *after_backward, *at_step)
    combined = [stage for stage in of_losses if stage.rule.edits]
    return Program(
        names=names,
        armed=tuple(sorted({index for stage in every for index in stage.indices})),
        of_losses=tuple(of_losses),
        in_backward=tuple(in_backward),
        after_backward=tuple(after_backward),
        at_step=tuple(at_step),
        of_weights=tuple(of_weights),
        checks=tuple(checks),
        per_tensor=_by_index(in_backward),
        contributing=_by_index([*combined, *in_backward]),
        modules=tuple(_modules(plan)),
        tags=tuple(rule for rule in rules if rule.target == "tensors" and plan.of(rule.id)),
    )


def _by_index(stages: Sequence[Stage]) -> dict[int, tuple[Rule, ...]]:
    rules: dict[int, list[Rule]] = {}
    for stage in stages:
        for index in stage.indices:
            rules.setdefault(index, []).append(stage.rule)
    return {index: tuple(some) for index, some in rules.items()}


def _modules(plan: Plan) -> list[ModuleProgram]:
    own: dict[str, list[Rule]] = {}
    for rule in in_order(plan.rules.rules):
        if rule.target == "modules":
            for binding in plan.of(rule.id):
                own.setdefault(binding.name, []).append(rule)
    known = [module.name for module in plan.manifest.modules if module.name in own]
    return [_module(name, own[name]) for name in known]


def _module(name: str, rules: Sequence[Rule]) -> ModuleProgram:
    shared = tuple(rule for rule in rules if isinstance(rule, LossRule))
    on_input = (rule for rule in rules if rule.ref.side == "input" and rule not in shared)
    on_output = (rule for rule in rules if rule.ref.side == "output")
    return ModuleProgram(name, tuple(on_input), tuple(on_output), shared)
