"""The plan: which rule acts on which tensor, when, and through which hook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from gradsurgeon.actions import CheckRule, LossRule, Moment, Rule, TrapRule
from gradsurgeon.common import _html, _live
from gradsurgeon.common._grouping import grouped, names_of
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
        if not self.title:
            return self.manifest.origin
        return self.title

    @cached_property
    @_live.uncollected()
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per tensor, such as ``conv1 output.grad``, its rules in order of effect."""
        names = {rule.id: names_of(self.of(rule.id)) for rule in self.rules.rules}
        chains = chains_of(self.rules.rules, names)
        in_model_order = {}
        for param in self.manifest.params:
            if param.name in chains:
                in_model_order[param.name] = chains.pop(param.name)
        return in_model_order | chains

    def of(self, rule_id: str) -> tuple[Binding, ...]:
        """Return the bindings of one rule."""
        return self._by_rule.get(rule_id, ())

    @cached_property
    def _by_rule(self) -> dict[str, tuple[Binding, ...]]:
        groups = grouped(self.bindings, attrgetter("rule"))
        return {rule: tuple(bindings) for rule, bindings in groups.items()}

    def __str__(self) -> str:
        rules = count(len(self.rules.rules), "rule")
        params = count(len(self.manifest.params), "parameter")
        elements = count(self.manifest.elements, "element")
        where = f"{printable(self.rules.file)} on {printable(self.subject)}"
        head = f"plan: {where}: {rules}, {params}, {elements}"
        rows = grid([RuleRow._fields, *rule_rows(self)], right=frozenset({4, 5}))
        lines = [head, "", *rows, "", *_chains(self)]
        doubts = []
        for rule_id, texts in self.rule_warnings.items():
            doubts += [f"  {rule_id}: {text}" for text in texts]
        doubts += [f"  {warning}" for warning in self.warnings]
        if doubts:
            lines += ["", "to know", *doubts]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return _html.pre(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1.

        Entries of ``rules`` with the action `conflict` or `combine` also have ``losses``, a list of names that is empty
        on modules, and ``method``, which is ``None`` of `conflict`.
        """
        return {
            "version": 1,
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "rules": [self._rule_entry(rule) for rule in self.rules.rules],
            "chains": {name: list(chain) for name, chain in self.chains.items()},
            "warnings": list(self.warnings),
        }

    def _rule_entry(self, rule: Rule) -> dict[str, Any]:
        bound = self.of(rule.id)
        entry: dict[str, Any] = {"id": rule.id, "action": rule.action}
        if isinstance(rule, LossRule):
            entry["losses"] = list(rule.losses or ())
            entry["method"] = getattr(rule, "method", None)
        entry |= {
            "tensor": str(rule.ref),
            "point": rule.point,
            "hook": hook_of(rule),
            "params": [],
            "modules": [],
        }
        if rule.target != "tensors":
            entry[rule.target] = names_of(bound)
        entry["elements"] = sum(param.numel for param in bound)
        entry["warnings"] = list(self.rule_warnings.get(rule.id, ()))
        return entry


_MODULE_HOOKS = {
    ("output", True): "hook on the output",
    ("output", False): "forward hook",
    ("input", True): "view of the input",
    ("input", False): "forward pre-hook",
}


def hook_of(rule: Rule) -> str:
    if isinstance(rule, LossRule):
        return "gradsurgeon.backward" if rule.target == "params" else "fork of the input"
    if isinstance(rule, CheckRule):
        return "around passes and updates"
    if rule.target == "params" or rule.judges_losses:
        hook = _HOOKS[rule.point]
    elif rule.target == "tensors":
        hook = "tag"
    else:
        hook = _MODULE_HOOKS[rule.ref.side, rule.ref.grad]
    if isinstance(rule, TrapRule) and rule.point not in ("step", "updated"):
        hook += f", {_HOOKS['step']}"
    return hook


class RuleRow(NamedTuple):
    """A rule in a table for people."""

    rule: str
    action: str
    at: str
    hook: str
    binds: str
    elements: str
    steps: str


def rule_rows(plan: Plan) -> Iterator[RuleRow]:
    for rule in plan.rules.rules:
        bound = plan.of(rule.id)
        hook = bound[0].hook if bound else "-"
        noun = "loss name" if rule.judges_losses else NOUNS[rule.target]
        binds = count(len(bound), noun)
        dormant = sum(param.dormant for param in bound)
        if dormant:
            # Not `frozen`, which readers would take for the work of a rule with the action `freeze`.
            binds += f" ({dormant} without requires_grad)"
        size = "-"
        if rule.target == "params":
            size = f"{sum(param.numel for param in bound):,}"
        yield RuleRow(rule.id, rule.action, rule.point, hook, binds, size, rule.steps.text)


def _chains(plan: Plan) -> Iterator[str]:
    if not plan.chains:
        yield "no rule binds anything"
        return
    shown = {rule.id: f"{rule.id} (at {rule.point})" for rule in plan.rules.rules}
    aliases = {param.name: param.aliases for param in plan.manifest.params}
    yield "effects per tensor, in order of effect"
    for chain, names in grouped(plan.chains, plan.chains.__getitem__).items():
        steps = [shown[rule_id] for rule_id in chain]
        yield "  " + " -> ".join(steps)
        noun = "parameter" if names[0] in aliases else "tensor"
        yield f"      {count(len(names), noun)}: {abridged(names, aliases)}"
    untouched = len(aliases.keys() - plan.chains)
    if untouched:
        yield f"  no rule: {count(untouched, 'parameter')}"
