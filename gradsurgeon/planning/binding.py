"""RuleSet + names -> Plan. Pure: it reads a manifest and touches nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from gradsurgeon.actions import POINTS, Point, Rule, Where
from gradsurgeon.errors import BindError, printable
from gradsurgeon.match import Pattern, compile_pattern, select, suggest
from gradsurgeon.planning.manifest import Manifest, Param
from gradsurgeon.schema import RuleSet

_HOOKS: dict[Point, str] = {
    "backward": "tensor hook",
    "accumulated": "end of backward",
    "step": "step pre-hook",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One rule on one parameter.

    Attributes:
        rule: id of the rule.
        name: canonical name of the parameter.
        aliases: its other names, where it is tied.
        tensor: which tensor of it, ``grad``.
        point: the moment at which the rule acts.
        hook: what carries it there.
        numel: number of elements.
        dormant: the parameter is frozen now; the rule acts once it is not.
    """

    rule: str
    name: str
    aliases: tuple[str, ...]
    tensor: str
    point: Point
    hook: str
    numel: int
    dormant: bool = False


@dataclass(frozen=True)
class Plan:
    """Rules bound to the names of one model. ``str(plan)`` is a table.

    Attributes:
        rules: the rules, in file order.
        manifest: the names they were bound to.
        bindings: every rule on every parameter it matched, rule by rule.
        rule_warnings: per rule id, what is doubtful about its match.
        warnings: what is doubtful about rules together.
    """

    rules: RuleSet
    manifest: Manifest
    bindings: tuple[Binding, ...]
    rule_warnings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per parameter, the ids of its rules in the order in which they take effect."""
        found: dict[str, list[Binding]] = {}
        for binding in self.bindings:
            found.setdefault(binding.name, []).append(binding)
        # The sort is stable: within one point the file order stands.
        return {
            param.name: tuple(
                binding.rule
                for binding in sorted(found[param.name], key=lambda b: POINTS.index(b.point))
            )
            for param in self.manifest.params
            if param.name in found
        }

    def of(self, rule_id: str) -> tuple[Binding, ...]:
        """Return the bindings of one rule."""
        return self._by_rule.get(rule_id, ())

    @cached_property
    def _by_rule(self) -> dict[str, tuple[Binding, ...]]:
        grouped: dict[str, list[Binding]] = {}
        for binding in self.bindings:
            grouped.setdefault(binding.rule, []).append(binding)
        return {rule: tuple(bindings) for rule, bindings in grouped.items()}

    def __str__(self) -> str:
        from gradsurgeon.planning.table import render  # noqa: PLC0415 # it draws what is defined here

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        rules = []
        for rule in self.rules.rules:
            bound = self.of(rule.id)
            rules.append(
                {
                    "id": rule.id,
                    "action": rule.action,
                    "tensor": rule.tensor,
                    "point": rule.point,
                    "hook": hook_of(rule),
                    "params": [binding.name for binding in bound],
                    "modules": [],
                    "elements": sum(binding.numel for binding in bound),
                    "warnings": list(self.rule_warnings.get(rule.id, ())),
                }
            )
        return {
            "version": 1,
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "rules": rules,
            "chains": {name: list(chain) for name, chain in self.chains.items()},
            "warnings": list(self.warnings),
        }


def hook_of(rule: Rule) -> str:
    """Return what carries a rule to its point."""
    return f"{_HOOKS[rule.point]}, step pre-hook" if rule.role == "trap" else _HOOKS[rule.point]


def bind(rules: RuleSet, manifest: Manifest) -> Plan:
    """Bind rules to the parameters of a manifest.

    Raises:
        BindError: all rules that match nothing, that break their `expect`, or that cannot act on what
            they match, at once.
    """
    names = [name for param in manifest.params for name in param.names]
    owner = [param for param in manifest.params for _ in param.names]
    complaints: list[str] = []
    bindings: list[Binding] = []
    warnings: dict[str, tuple[str, ...]] = {}
    for rule in rules.rules:
        matched, doubts = _match(rule, names, owner)
        place = f"{rules.place(rule.id)}: rule {rule.id}: "
        complaints += [place + text for text in _complaints(rule, matched, names, owner)]
        if matched and not any(param.requires_grad for param in matched):
            doubts.append("all parameters it matches are frozen: it acts once they are not")
        if rule.optional and not matched:
            doubts.append("matches nothing (optional)")
        warnings[rule.id] = (*doubts, *rule.notes)
        bindings += [_binding(rule, param) for param in matched]
    if complaints:
        raise BindError(complaints)
    plan = Plan(rules, manifest, tuple(bindings), warnings)
    return Plan(rules, manifest, plan.bindings, warnings, tuple(_overlaps(plan)))


def _binding(rule: Rule, param: Param) -> Binding:
    return Binding(
        rule=rule.id,
        name=param.name,
        aliases=param.aliases,
        tensor=rule.tensor,
        point=rule.point,
        hook=hook_of(rule),
        numel=param.numel,
        dormant=not param.requires_grad,
    )


def _match(
    rule: Rule, names: Sequence[str], owner: Sequence[Param]
) -> tuple[list[Param], list[str]]:
    """Return the parameters that a rule selects, in model order, and what is doubtful about it."""
    doubts: list[str] = []
    chosen: set[str] = set()
    for pattern in rule.patterns:
        hits = select([pattern], names)
        if not hits and len(rule.params) > 1:
            doubts.append(
                f"pattern {_quote(pattern)} matches nothing; {suggest(pattern.text, names)}"
            )
        chosen.update(owner[index].name for index in hits)
    for text in rule.exclude:
        pattern = compile_pattern(text)
        hit_names = {names[index]: owner[index] for index in select([pattern], names)}
        dropped = {param.name for param in hit_names.values()} & chosen
        if not dropped:
            doubts.append(f"exclude {_quote(pattern)} takes nothing out of the match")
        doubts += [
            f"exclude {_quote(pattern)} also takes out {printable(', '.join(others))}: the same tensor"
            for param in {p.name: p for p in hit_names.values() if p.name in dropped}.values()
            if (others := [name for name in param.names if name not in hit_names])
        ]
        chosen -= dropped
    unique = {param.name: param for param in owner}
    return [p for p in unique.values() if p.name in chosen and not failed(rule.where, p)], doubts


def failed(where: Where, param: Param) -> str:
    """Return the first condition that a parameter does not meet; empty where it meets all."""
    if where.module_type is not None:
        pattern = compile_pattern(where.module_type)
        if not any(pattern.matches(name) for name in param.module_type):
            return "module_type"
    if where.ndim is not None and (param.shape is None or len(param.shape) != where.ndim):
        return "ndim"
    if where.dtype is not None and param.dtype != where.dtype.removeprefix("torch."):
        return "dtype"
    if where.requires_grad is not None and param.requires_grad != where.requires_grad:
        return "requires_grad"
    if where.numel is not None:
        low, high = where.numel.min or 0, where.numel.max
        if param.numel < low or (high is not None and param.numel > high):
            return "numel"
    return ""


def _complaints(
    rule: Rule, matched: Sequence[Param], names: Sequence[str], owner: Sequence[Param]
) -> Iterator[str]:
    if not matched and not rule.optional:
        yield _no_match(rule, names, owner)
    if rule.expect is not None and rule.expect.params != len(matched):
        yield (
            f"expected {rule.expect.params} parameters, matched {len(matched)}"
            f"{_examples(matched)}; correct the pattern or the `expect`"
        )
    lazy = [param for param in matched if param.shape is None]
    if lazy:
        yield (
            f"{len(lazy)} parameters have no shape yet{_examples(lazy)}: hooks cannot be put on lazy "
            "modules; run one forward pass before applying rules"
        )
    complex_ones = [param for param in matched if param.dtype.startswith("complex")]
    if complex_ones and (reason := rule.complex_problem()):
        yield f"{reason}{_examples(complex_ones)}; leave them out by `exclude` or `where`"
    sparse = [param for param in matched if param.sparse]
    if sparse and not rule.keeps_zero:
        yield (
            f"the gradients of {len(sparse)} parameters are sparse{_examples(sparse)}, and the bounds "
            "exclude 0, so the result would be dense; include 0 in the bounds, or exclude them"
        )


def _no_match(rule: Rule, names: Sequence[str], owner: Sequence[Param]) -> str:
    hits = select(list(rule.patterns), names)
    if not hits:
        texts = ", ".join(_quote(pattern) for pattern in rule.patterns)
        hints = list(dict.fromkeys(suggest(pattern.text, names) for pattern in rule.patterns))
        return f"no parameter of the model matches {texts}; {'; '.join(hints)}"
    found = list({owner[index].name: owner[index] for index in hits}.values())
    reasons = Counter(filter(None, (failed(rule.where, param) for param in found)))
    if not reasons:
        return f"{len(found)} parameters match, but `exclude` takes all of them out"
    causes = ", ".join(f"`{key}` ({count})" for key, count in reasons.most_common())
    return (
        f"{len(found)} parameters match{_examples(found)}, but `where` keeps none of them: {causes}"
    )


def _overlaps(plan: Plan) -> Iterator[str]:
    """Yield warnings on rules that change the same tensors."""
    rules = {rule.id: rule for rule in plan.rules.rules}
    bound = {rule_id: {binding.name for binding in plan.of(rule_id)} for rule_id in rules}
    for first, second in combinations(rules.values(), 2):
        shared = bound[first.id] & bound[second.id]
        if not shared:
            continue
        order = sorted((first, second), key=lambda rule: POINTS.index(rule.point))
        example = next(binding.name for binding in plan.of(first.id) if binding.name in shared)
        what = (
            f"{len(shared)} parameter{'s' if len(shared) != 1 else ''} (e.g. {printable(example)})"
        )
        if first.role == second.role == "edit":
            yield (
                f"{first.id} and {second.id} both change {what}; "
                f"effective order: {order[0].id} (at {order[0].point}), "
                f"then {order[1].id} (at {order[1].point})"
            )
        elif order[0] is second and "edit" in (first.role, second.role):
            yield (
                f"{second.id} (at {second.point}) comes before {first.id} (at {first.point}) on {what}, "
                "although it stands later in the file"
            )


def _examples(params: Sequence[Param]) -> str:
    if not params:
        return ""
    shown = ", ".join(printable(param.name) for param in params[:3])
    return f" ({shown}{', ...' if len(params) > 3 else ''})"  # noqa: PLR2004 # as many as are shown


def _quote(pattern: Pattern) -> str:
    return f'"{printable(pattern.text)}"'
