"""The plan: which rule acts on which tensor, when, and through which hook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from gradsurgeon.actions import CheckRule, LossRule, Moment, Rule, TrapRule
from gradsurgeon.common import _html, _live
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.manifest import Manifest
from gradsurgeon.language.planning.matching import chains_of
from gradsurgeon.language.planning.table import NOUNS, abridged, count, grid
from gradsurgeon.language.schema import RuleSet

_HOOKS: dict[Moment, str] = {
    "backward": "tensor hook",
    "accumulated": "end of backward",
    "step": "step pre-hook",
    "updated": "step post-hook",
}

_MAX_CHAINS = 100


@dataclass(frozen=True, slots=True)
class Binding:
    """One rule on one parameter, module or tag.

    Attributes:
        rule: id of the rule.
        name: canonical name of the parameter or module; for a tag the pattern, because the script
            chooses names only later.
        aliases: its other names, if it is tied or shared.
        tensor: which tensor of it: ``grad``, ``output.grad``, ``input[0]``.
        point: the moment at which the rule acts.
        hook: the hook that runs the rule.
        numel: number of elements of a parameter, 0 for modules and tags.
        dormant: the parameter is frozen now; the rule acts once it is not.
    """

    rule: str
    name: str
    aliases: tuple[str, ...]
    tensor: str
    point: Moment
    hook: str
    numel: int = 0
    dormant: bool = False


@dataclass(frozen=True)
class Plan:
    """Rules bound to the names of one model. ``str(plan)`` is a table.

    Attributes:
        rules: the rules, in file order.
        manifest: the names they were bound to.
        bindings: every rule on everything it matched, rule by rule.
        rule_warnings: per rule id, doubts about its match.
        warnings: doubts about rules together.
        title: name of the model among several, empty if its class name is enough.
        elsewhere: per rule id without a match on this rank, the ranks with a match.
        refused: per rule id that cannot act on this model, the complaints; only in the plan of a pack that the launcher
            puts on a script.
    """

    rules: RuleSet
    manifest: Manifest
    bindings: tuple[Binding, ...]
    rule_warnings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    title: str = ""
    elsewhere: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The name of the model."""
        return self.title or self.manifest.origin

    @cached_property
    @_live.uncollected()
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per tensor, such as ``conv1 output.grad``, its rules in order of effect."""
        names = {rule.id: [one.name for one in self.of(rule.id)] for rule in self.rules.rules}
        chains = chains_of(self.rules.rules, names)
        place = {param.name: number for number, param in enumerate(self.manifest.params)}
        return {
            key: chains[key] for key in sorted(chains, key=lambda key: place.get(key, len(place)))
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
        doubts = [f"  {text}" for text in _doubts(self)]
        to_know = ["", "to know", *doubts] if doubts else []
        return "\n".join([_head(self), "", *_rules(self), "", *_chains(self), *to_know])

    def _repr_html_(self) -> str:
        return _html.pre(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1.

        Entries of ``rules`` with the action `conflict` or `combine` also have ``losses``, a list of names that is empty
        on modules, and ``method``, which is ``None`` of `conflict`.
        """
        rules = []
        for rule in self.rules.rules:
            bound = self.of(rule.id)
            names = [binding.name for binding in bound]
            of_losses = (
                {"losses": list(rule.losses or ()), "method": getattr(rule, "method", None)}
                if isinstance(rule, LossRule)
                else {}
            )
            rules.append(
                {
                    "id": rule.id,
                    "action": rule.action,
                    **of_losses,
                    "tensor": str(rule.ref),
                    "point": rule.point,
                    "hook": hook_of(rule),
                    "params": names if rule.target == "params" else [],
                    "modules": names if rule.target == "modules" else [],
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
    if isinstance(rule, LossRule):
        return "gradsurgeon.backward" if rule.target == "params" else "fork of the input"
    if isinstance(rule, CheckRule):
        return "around passes and updates"
    if rule.target == "params":
        hook = _HOOKS[rule.point]
    elif rule.target == "tensors":
        hook = "tag"
    elif rule.ref.side == "output":
        hook = "hook on the output" if rule.ref.grad else "forward hook"
    else:
        hook = "view of the input" if rule.ref.grad else "forward pre-hook"
    before = _HOOKS["step"]
    return f"{hook}, {before}" if isinstance(rule, TrapRule) and hook != before else hook


def _head(plan: Plan) -> str:
    return (
        f"plan: {printable(plan.rules.file)} on {printable(plan.subject)}: "
        f"{count(len(plan.rules.rules), 'rule')}, "
        f"{count(len(plan.manifest.params), 'parameter')}, "
        f"{count(plan.manifest.elements, 'element')}"
    )


def _rules(plan: Plan) -> Iterator[str]:
    rows = [("rule", "action", "at", "hook", "binds", "elements", "steps")]
    for rule in plan.rules.rules:
        bound = plan.of(rule.id)
        dormant = sum(binding.dormant for binding in bound)
        # Not `frozen`, which readers would take for the work of a rule with the action `freeze`.
        frozen = f" ({dormant} without requires_grad)" if dormant else ""
        steps = rule.steps
        last = "" if steps.to is None else steps.to - 1  # a range names its last number everywhere
        window = "" if (steps.from_, steps.to) == (0, None) else f"{steps.from_}..{last}"
        every = f" every {steps.every}" if steps.every > 1 else ""
        rows.append(
            (
                rule.id,
                rule.action,
                rule.point,
                bound[0].hook if bound else "-",
                f"{count(len(bound), NOUNS[rule.target])}{frozen}",
                f"{sum(binding.numel for binding in bound):,}" if rule.target == "params" else "-",
                f"{window}{every}".strip() or "all",
            )
        )
    yield from grid(rows, right=frozenset({4, 5}))


def _chains(plan: Plan) -> Iterator[str]:
    if not plan.chains:
        yield "no rule binds anything"
        return
    points = {rule.id: rule.point for rule in plan.rules.rules}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, chain in plan.chains.items():
        groups.setdefault(chain, []).append(name)
    untouched = sum(param.name not in plan.chains for param in plan.manifest.params)
    yield "effects per tensor, in order of effect"
    aliases = {param.name: param.aliases for param in plan.manifest.params}
    for chain, names in islice(groups.items(), _MAX_CHAINS):
        yield "  " + " -> ".join(f"{rule} (at {points[rule]})" for rule in chain)
        noun = "parameter" if names[0] in aliases else "tensor"
        yield f"      {count(len(names), noun)}: {abridged(names, aliases)}"
    if len(groups) > _MAX_CHAINS:
        more = len(groups) - _MAX_CHAINS
        yield f"  and {more} more chains: `plan --format json` lists all"
    if untouched:
        yield f"  no rule: {count(untouched, 'parameter')}"


def _doubts(plan: Plan) -> Iterator[str]:
    for rule in plan.rules.rules:
        yield from (f"{rule.id}: {text}" for text in plan.rule_warnings.get(rule.id, ()))
    yield from plan.warnings
