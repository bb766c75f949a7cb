"""What each rule of a set matches in a model, and the chain of rules of each tensor.

Unlike `planning.bind` this never raises: a rule that cannot act is what a review is about. And it is
made for two rule sets that are nearly alike: what both select is matched once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gradsurgeon.actions import FreezeRule, Rule, TrapRule, in_order
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import (
    Manifest,
    Param,
    Thing,
    clashes,
    is_for,
    name_indexes,
    obstacles,
    undecided,
)
from gradsurgeon.schema import RuleSet


def protects(rule: Rule) -> bool:
    """Tell whether a rule stands between a gradient and the weight; the others look on."""
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


@dataclass(frozen=True, slots=True)
class Match:
    """What one selection picks out of a model."""

    things: tuple[Thing, ...] = ()  # none for tags, whose names the script makes
    names: tuple[str, ...] = ()  # canonical, in model order; of tags the patterns
    members: frozenset[str] = frozenset()  # the names as a set
    elements: int = 0  # of the parameters
    is_for: bool = True  # whether the rule is for this model at all
    undecided: tuple[str, ...] = ()  # conditions that the names do not tell: nothing is matched

    @property
    def decided(self) -> bool:
        """Whether the number of matches is known and means something."""
        return self.is_for and not self.undecided


class Matcher:
    """Matches rules with the names of a model, once per distinct selection."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.names = name_indexes(manifest)
        self._matches: dict[object, Match] = {}
        # Rules that select the same share one set, so that two sets are compared once.
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    def match(self, rule: Rule) -> Match:
        texts = frozenset(getattr(rule, rule.target))
        key = (rule.target, texts, frozenset(rule.exclude), rule.where, rule.model)
        if key not in self._matches:
            self._matches[key] = self._match(rule)
        return self._matches[key]

    def _match(self, rule: Rule) -> Match:
        if texts := undecided(rule, self.manifest):
            return Match(undecided=tuple(texts))
        if rule.model is not None and not is_for(rule.model, self.manifest):
            return Match(is_for=False)
        if rule.target == "tensors":
            names = tuple(dict.fromkeys(pattern.text for pattern in rule.patterns))
            return Match(names=names, members=frozenset(names))
        things = tuple(self.names[rule.target].select(rule))
        names = tuple(thing.name for thing in things)
        members = frozenset(names)
        elements = sum(thing.numel for thing in things if isinstance(thing, Param))
        return Match(things, names, self._sets.setdefault(members, members), elements)

    def hits(self, rule: Rule, pattern: str) -> dict[str, Thing] | None:
        """Return what a pattern of a rule matches, by the name that it matched; ``None`` for tags."""
        names = self.names.get(rule.target)
        return None if names is None else names.hits(compile_pattern(pattern))


class MatchedRules:
    """The rules of one set by their ids, in file order, with what each matches in one model."""

    def __init__(self, rules: RuleSet, matcher: Matcher) -> None:
        self.rules = {rule.id: rule for rule in rules.rules}
        self.matches = {rule.id: matcher.match(rule) for rule in rules.rules}
        self.matcher = matcher

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Per tensor, the ids of its rules in order of effect; keys and order as in `Plan.chains`."""
        chains: dict[str, list[str]] = {}
        for rule in in_order(self.rules.values()):
            suffix = "" if rule.target == "params" else f" {rule.ref}"
            for name in self.matches[rule.id].names:
                chains.setdefault(name + suffix, []).append(rule.id)
        return {key: tuple(chain) for key, chain in chains.items()}

    def params_under(self, asked: Callable[[Rule], bool]) -> frozenset[str]:
        rules = self.rules.values()
        ids = [rule.id for rule in rules if rule.target == "params" and asked(rule)]
        return frozenset().union(*(self.matches[rule].members for rule in ids))

    def has_no_match(self, rule_id: str) -> bool:
        """Tell whether a rule matches nothing although it is not optional."""
        rule, match = self.rules[rule_id], self.matches[rule_id]
        return match.decided and not match.names and not rule.optional

    def no_match(self, rule_id: str) -> str:
        rule = self.rules[rule_id]
        return self.matcher.names[rule.target].no_match(rule)

    def breaks_expect(self, rule_id: str) -> bool:
        rule, match = self.rules[rule_id], self.matches[rule_id]
        return match.decided and rule.expect is not None and rule.expect.params != len(match.names)

    def obstacles(self, rule_id: str) -> list[str]:
        match = self.matches[rule_id]
        if not match.is_for or self.rules[rule_id].target == "tensors":
            return []
        if match.undecided:
            return list(match.undecided)
        rule = self.rules[rule_id]
        return [*obstacles(rule, match.things, self.matcher.manifest), *self._clashes[rule_id]]

    @cached_property
    def _clashes(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {rule: [] for rule in self.rules}
        names = {rule: match.names for rule, match in self.matches.items()}
        for rule, text in clashes([*self.rules.values()], names):
            found[rule.id].append(text)
        return found


class ChainChange(NamedTuple):
    """A tensor that goes through other rules than before, by id in order of effect."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def changed_chains(
    before: MatchedRules, after: MatchedRules, new_ids: Mapping[str, str]
) -> list[ChainChange]:
    """Return the tensors whose chain differs; that a rule has another id is no difference."""
    # Few distinct chains stand for many tensors.
    renamed = {
        chain: tuple(new_ids.get(rule, rule) for rule in chain)
        for chain in set(before.chains.values())
    }
    changes = []
    for name in dict.fromkeys((*before.chains, *after.chains)):
        old, new = before.chains.get(name, ()), after.chains.get(name, ())
        if renamed.get(old, ()) != new:
            changes.append(ChainChange(name, old, new))
    return changes
