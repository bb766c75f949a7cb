"""What a rule set does to a model: what each rule matches, and the chain of rules of each tensor.

Unlike `planning.bind` this never raises: a rule that cannot act is what a review is about. And it is
made for two rule sets that are nearly alike: what both select is matched once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradsurgeon.actions import MOMENTS, Rule
from gradsurgeon.planning import Manifest, NameIndex, Thing, is_for, obstacles, undecided
from gradsurgeon.schema import RuleSet

# What stands between a gradient and the weight; the others look on.
PROTECTING = ("edit", "trap", "freeze")


@dataclass(frozen=True, slots=True)
class Match:
    """What one selection picks out of a model.

    Attributes:
        things: the parameters or modules; empty for tags, whose names the script makes.
        names: their canonical names, in model order; of tags the patterns.
        members: the same as a set.
        elements: number of elements of the parameters.
        is_for: whether the rule is for this model at all.
        undecided: conditions on what the source of the names does not tell; then nothing is matched.
    """

    things: tuple[Thing, ...]
    names: tuple[str, ...]
    members: frozenset[str]
    elements: int
    is_for: bool = True
    undecided: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether what is matched can be counted."""
        return self.is_for and not self.undecided


class Matcher:
    """The names of a model, matched once per distinct selection."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._names = {
            "params": NameIndex("parameter", manifest.params),
            "modules": NameIndex("module", manifest.modules),
        }
        self._sizes = {param.name: param.numel for param in manifest.params}
        self._known: dict[object, Match] = {}

    def match(self, rule: Rule) -> Match:
        """Return what a rule matches."""
        texts = frozenset(pattern.text for pattern in rule.patterns)
        key = (rule.target, texts, frozenset(rule.exclude), rule.where, rule.model)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._match(rule)
        return known

    def _match(self, rule: Rule) -> Match:
        if texts := undecided(rule, self.manifest):
            return Match((), (), frozenset(), 0, undecided=tuple(texts))
        if rule.model is not None and not is_for(rule.model, self.manifest):
            return Match((), (), frozenset(), 0, is_for=False)
        if rule.target == "tensors":
            names = tuple(dict.fromkeys(pattern.text for pattern in rule.patterns))
            return Match((), names, frozenset(names), 0)
        things = tuple(self._names[rule.target].select(rule))
        names = tuple(thing.name for thing in things)
        elements = sum(map(self._sizes.__getitem__, names)) if rule.target == "params" else 0
        return Match(things, names, frozenset(names), elements)

    def no_match(self, rule: Rule) -> str:
        """Return why a rule matches nothing, with the nearest names."""
        return self._names[rule.target].no_match(rule)


class Effects:
    """One rule set on one model."""

    def __init__(self, rules: RuleSet, matcher: Matcher) -> None:
        self.rules = {rule.id: rule for rule in rules.rules}
        self.matches = {rule.id: matcher.match(rule) for rule in rules.rules}
        self._matcher = matcher

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per tensor, the ids of its rules in order of effect; keys and order as in `Plan.chains`."""
        found: dict[str, list[str]] = {}
        # The sort is stable: within one point the file order stands.
        for rule in sorted(self.rules.values(), key=lambda rule: MOMENTS.index(rule.point)):
            suffix = "" if rule.target == "params" else f" {rule.ref}"
            for name in self.matches[rule.id].names:
                found.setdefault(f"{name}{suffix}" if suffix else name, []).append(rule.id)
        return {key: tuple(chain) for key, chain in found.items()}

    @cached_property
    def covered(self) -> frozenset[str]:
        """The parameters that any rule acts on."""
        return self._params(("observe", "capture", *PROTECTING))

    @cached_property
    def protected(self) -> frozenset[str]:
        """The parameters whose gradients a rule edits, traps or keeps from the optimizer."""
        return self._params(PROTECTING)

    def _params(self, roles: tuple[str, ...]) -> frozenset[str]:
        own = [one for one in self.rules.values() if one.target == "params" and one.role in roles]
        return frozenset().union(*(self.matches[rule.id].members for rule in own))

    def has_no_match(self, rule_id: str) -> bool:
        """Tell whether a rule matches nothing although it must."""
        rule, match = self.rules[rule_id], self.matches[rule_id]
        return match.decided and not match.names and not rule.optional

    def no_match(self, rule_id: str) -> str:
        """Return why a rule matches nothing, with the nearest names."""
        return self._matcher.no_match(self.rules[rule_id])

    def breaks_expect(self, rule_id: str) -> bool:
        """Tell whether a rule matches another number of parameters than it says."""
        rule, match = self.rules[rule_id], self.matches[rule_id]
        return match.decided and rule.expect is not None and rule.expect.params != len(match.names)

    def obstacles(self, rule_id: str) -> list[str]:
        """Return why a rule cannot act on what it matches."""
        match = self.matches[rule_id]
        if not match.is_for or self.rules[rule_id].target == "tensors":
            return []
        if match.undecided:
            return list(match.undecided)
        return obstacles(self.rules[rule_id], match.things, self._matcher.manifest)
