"""The matches of each rule in a model, and the chain of rules of each tensor.

Unlike `planning.bind` this never raises: a review reports a rule that cannot act. Two similar rule sets share
one `Matcher`, which matches equal selections once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from gradsurgeon.actions import FreezeRule, Rule, TrapRule, in_order
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import (
    Manifest,
    Param,
    Thing,
    clashes,
    examples,
    is_for,
    name_indexes,
    obstacles,
    undecided,
)
from gradsurgeon.planning.table import count
from gradsurgeon.schema import RuleSet


def protects(rule: Rule) -> bool:
    """Tell whether a rule edits, traps or freezes; other rules only observe."""
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


@dataclass(frozen=True, slots=True)
class Match:
    """The matches of one selection in a model."""

    things: tuple[Thing, ...] = ()  # none for tags, which the script names
    names: tuple[str, ...] = ()  # canonical, in model order; for tags, the patterns
    members: frozenset[str] = frozenset()  # the names as a set
    elements: int = 0  # of the parameters
    is_for: bool = True  # False if `model` names another class
    undecided: tuple[str, ...] = ()  # conditions that the names cannot decide; then nothing matches

    @property
    def decided(self) -> bool:
        """Whether the number of matches is known, and the rule is for this model."""
        return self.is_for and not self.undecided


class Matcher:
    """Matches rules against the names of a model, once per distinct selection."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.names = name_indexes(manifest)
        self._matches: dict[object, Match] = {}
        # Rules with equal matches share one set, so two sets are compared once.
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
        """Return the matches of a pattern, by the name that it matched; ``None`` for tags."""
        names = self.names.get(rule.target)
        return None if names is None else names.hits(compile_pattern(pattern))


class Flaw(NamedTuple):
    """Why training with a rule would end with an error before its first step."""

    kind: Literal["no-match", "expect", "cannot-act"]
    at: tuple[str, ...]  # the option in the file
    text: str
    hint: str


class MatchedRules:
    """The rules of one set by id, in file order, with their matches in one model."""

    def __init__(self, rules: RuleSet, matcher: Matcher) -> None:
        self.rules = {rule.id: rule for rule in rules.rules}
        self.matches = {rule.id: matcher.match(rule) for rule in rules.rules}
        self.matcher = matcher

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """The ids of the rules of each tensor in order of effect; keys and order as in `Plan.chains`."""
        chains: dict[str, list[str]] = {}
        for rule in in_order(self.rules.values()):
            suffix = "" if rule.target == "params" else f" {rule.ref}"
            for name in self.matches[rule.id].names:
                chains.setdefault(name + suffix, []).append(rule.id)
        return {key: tuple(chain) for key, chain in chains.items()}

    def params_under(self, asked: Callable[[Rule], bool] = lambda _: True) -> frozenset[str]:
        """Return the parameters under rules, or under the rules for which ``asked`` is true."""
        rules = [rule for rule in self.rules.values() if rule.target == "params" and asked(rule)]
        return frozenset().union(*(self.matches[rule.id].members for rule in rules))

    def flaws(self, rule_id: str) -> Iterator[Flaw]:
        """Yield why training with a rule would end before its first step."""
        rule, match = self.rules[rule_id], self.matches[rule_id]
        if match.decided and not match.names and not rule.optional:
            text = self.matcher.names[rule.target].no_match(rule)
            hint = "correct the pattern, or write `optional: true` if it may match nothing"
            yield Flaw("no-match", (rule.target,), text, hint)
        if match.decided and rule.expect is not None and rule.expect.params != len(match.names):
            matched = f"matched {len(match.names)}{examples(match.things)}"
            text = f"expected {count(rule.expect.params, 'parameter')}, {matched}"
            yield Flaw("expect", ("expect", "params"), text, "correct the pattern or the `expect`")
        if match.is_for and rule.target != "tensors":
            texts = match.undecided or (
                *obstacles(rule, match.things, self.matcher.manifest),
                *self._clashes[rule_id],
            )
            yield from (Flaw("cannot-act", ("id",), text, "") for text in texts)

    @cached_property
    def _clashes(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {rule: [] for rule in self.rules}
        names = {rule: match.names for rule, match in self.matches.items()}
        for rule, text in clashes([*self.rules.values()], names):
            found[rule.id].append(text)
        return found


class ChainChange(NamedTuple):
    """A tensor whose chain of rules differs: ids in order of effect."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def changed_chains(
    before: MatchedRules, after: MatchedRules, new_ids: Mapping[str, str]
) -> list[ChainChange]:
    """Return the tensors whose chain differs; a renamed rule is no difference."""
    # Many tensors share few distinct chains.
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
