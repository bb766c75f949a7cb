"""The plan: which rule acts on which tensor, when, and what carries it there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradsurgeon.actions import MOMENTS, Moment, Rule
from gradsurgeon.planning.manifest import Manifest
from gradsurgeon.schema import RuleSet

_HOOKS: dict[Moment, str] = {
    "backward": "tensor hook",
    "accumulated": "end of backward",
    "step": "step pre-hook",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One rule on one parameter, module or tag.

    Attributes:
        rule: id of the rule.
        name: canonical name of the parameter or module; of a tag the pattern, as its names are not
            known before the script uses them.
        aliases: its other names, where it is tied or shared.
        tensor: which tensor of it: ``grad``, ``output.grad``, ``input[0]``.
        point: the moment at which the rule acts.
        hook: what carries it there.
        numel: number of elements of a parameter, 0 of the rest.
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
        rule_warnings: per rule id, what is doubtful about its match.
        warnings: what is doubtful about rules together.
        title: what the model is called among several, empty where its class name will do.
        elsewhere: per rule id that matches nothing on this rank, which ranks have what it matches.
    """

    rules: RuleSet
    manifest: Manifest
    bindings: tuple[Binding, ...]
    rule_warnings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    title: str = ""
    elsewhere: dict[str, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """What the model is called."""
        return self.title or self.manifest.origin

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per tensor, the ids of its rules in the order in which they take effect.

        Parameters go by their name; ``conv1 output.grad`` is a tensor of a module.
        """
        found: dict[str, list[Binding]] = {}
        kinds = {rule.id: rule.target for rule in self.rules.rules}
        for binding in self.bindings:
            own = kinds[binding.rule] == "params"
            key = binding.name if own else f"{binding.name} {binding.tensor}"
            found.setdefault(key, []).append(binding)
        order = {param.name: place for place, param in enumerate(self.manifest.params)}
        return {
            # The sort is stable: within one point the file order stands.
            key: tuple(b.rule for b in sorted(chain, key=lambda b: MOMENTS.index(b.point)))
            for key, chain in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
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
            names = [binding.name for binding in bound]
            rules.append(
                {
                    "id": rule.id,
                    "action": rule.action,
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
    """Return what carries a rule to its point."""
    if rule.target == "params":
        hook = _HOOKS[rule.point]
    elif rule.target == "tensors":
        hook = "tag"
    elif rule.ref.side == "output":
        hook = "hook on the output" if rule.ref.grad else "forward hook"
    else:
        hook = "view of the input" if rule.ref.grad else "forward pre-hook"
    return f"{hook}, step pre-hook" if rule.role == "trap" else hook
