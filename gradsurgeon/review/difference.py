"""Compare two rule sets on the names of a model: the effect of the change. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from gradsurgeon.actions import FreezeRule, Options, Rule, Steps, TrapRule
from gradsurgeon.planning import Manifest, Match, MatchedRules, Matcher, Obstacle
from gradsurgeon.schema import RuleSet

Ids = tuple[str, ...]
Kind = Literal[
    "lost-protection",  # parameters that no rule protects any more
    "lost-trap",  # tensors that lost a trap, and that other rules still protect
    "weaker-trap",  # tensors whose trap only warns now
    "unfrozen",  # parameters that no rule freezes any more
    "no-match",  # a rule that newly matches nothing
    "expect",  # a rule that newly breaks its `expect`
    "cannot-act",  # a rule that newly cannot act
    "order",  # tensors whose rules take effect in another order
]


class OptionChange(NamedTuple):
    name: str  # with dots into mappings: ``where.ndim``
    before: Any  # the value as in a rule file, ``None`` if it is not given
    after: Any


@dataclass(frozen=True, slots=True)
class RuleChange:
    id: str
    action: str
    target: str
    # The changed options; for an added or removed rule, the given ones.
    options: tuple[OptionChange, ...]
    before: Match  # no match for an added rule
    after: Match  # no match for a removed rule


class ChainChange(NamedTuple):
    """A tensor whose chain of rules differs: ids in order of effect."""

    name: str
    before: Ids
    after: Ids


class DiffWarning(NamedTuple):
    """A part of the change that a reviewer must not miss."""

    kind: Kind
    rules: Ids = ()  # several in order of effect
    names: tuple[str, ...] = ()  # of parameters, or of tensors as in the chains
    detail: str = ""  # the reason in words; for an ``expect`` the numbers


@dataclass(frozen=True)
class Difference:
    old: RuleSet
    new: RuleSet
    manifest: Manifest
    added: tuple[RuleChange, ...]
    removed: tuple[RuleChange, ...]
    changed: tuple[RuleChange, ...]  # rules with other options
    unchanged: Ids
    order_before: Ids  # the rules of both sides, in the old order ...
    order_after: Ids  # ... and in the new one
    params: tuple[ChainChange, ...]  # in model order
    tensors: tuple[ChainChange, ...]  # of modules and tags, such as ``conv1 output.grad``
    covered: tuple[int, int]  # number of parameters with rules, before and after
    # Parameters that rules edited, trapped or froze before, and none does now.
    lost: tuple[str, ...]
    warnings: tuple[DiffWarning, ...]  # the worst first

    @property
    def order_changed(self) -> bool:
        return self.order_before != self.order_after

    @cached_property
    def in_effect(self) -> bool:
        """Whether a training run could show a difference; an order without effect does not count."""
        rules = self.added or self.removed or self.changed
        return bool(rules or self.params or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        return {
            "version": 1,
            "added": [_one_side(change, change.after) for change in self.added],
            "removed": [_one_side(change, change.before) for change in self.removed],
            "changed": [_both_sides(change) for change in self.changed],
            "order_changed": self.order_changed,
            "order": {"before": self.order_before, "after": self.order_after},
            "params": [chain._asdict() for chain in self.params],
            "tensors": [chain._asdict() for chain in self.tensors],
            "lost_protection": self.lost,
            "covered": {"before": self.covered[0], "after": self.covered[1]},
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "warnings": [warning._asdict() for warning in self.warnings],
            "in_effect": self.in_effect,
        }


def _one_side(change: RuleChange, match: Match) -> dict[str, Any]:
    return {
        "id": change.id,
        "action": change.action,
        "target": change.target,
        "params": match.names if change.target == "params" else (),
        "modules": match.names if change.target == "modules" else (),
        "elements": match.elements,
    }


def _both_sides(change: RuleChange) -> dict[str, Any]:
    return {
        "id": change.id,
        "action": change.action,
        "target": change.target,
        "fields": [option._asdict() for option in change.options],
        "params_before": change.before.names,
        "params_after": change.after.names,
        "elements_before": change.before.elements,
        "elements_after": change.after.elements,
    }


def compare(old: RuleSet, new: RuleSet, manifest: Manifest) -> Difference:
    """Return the effect of a change of rules on a model; a rule that matches nothing is a warning."""
    matcher = Matcher(manifest)
    before, after = MatchedRules(old, matcher), MatchedRules(new, matcher)
    order = {param.name: position for position, param in enumerate(manifest.params)}
    names = dict.fromkeys((*before.chains, *after.chains))
    sides = (ChainChange(n, before.chains.get(n, ()), after.chains.get(n, ())) for n in names)
    chains = [chain for chain in sides if chain.before != chain.after]
    chains.sort(key=lambda chain: order.get(chain.name, len(order)))
    protected = (_params_under(side, protecting=True) for side in (before, after))
    lost = sorted(frozenset.difference(*protected), key=order.__getitem__)
    both = tuple(rule for rule in after.rules if rule in before.rules)
    changes = [_rule_change(before, after, rule) for rule in both]
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        added=tuple(_rule_change(before, after, r) for r in after.rules if r not in before.rules),
        removed=tuple(_rule_change(before, after, r) for r in before.rules if r not in after.rules),
        changed=tuple(change for change in changes if change.options),
        unchanged=tuple(change.id for change in changes if not change.options),
        order_before=tuple(rule for rule in before.rules if rule in after.rules),
        order_after=both,
        params=tuple(chain for chain in chains if chain.name in order),
        tensors=tuple(chain for chain in chains if chain.name not in order),
        covered=(len(_params_under(before)), len(_params_under(after))),
        lost=tuple(lost),
        warnings=tuple(_warnings(before, after, chains, lost)),
    )


def _params_under(side: MatchedRules, *, protecting: bool = False) -> frozenset[str]:
    """Return the parameters under rules, or under rules that protect."""
    rules = [rule for rule in side.rules.values() if rule.target == "params"]
    members = (side.matches[rule.id].members for rule in rules if not protecting or protects(rule))
    return frozenset().union(*members)


def _rule_change(before: MatchedRules, after: MatchedRules, rule: str) -> RuleChange:
    old, new = before.rules.get(rule), after.rules.get(rule)
    shown = new or old
    assert shown is not None  # noqa: S101 # the id is that of one side
    if old is not None and new is not None:
        options = changed_options(old, new)
    else:
        options = tuple(
            OptionChange(name, None, value) if new else OptionChange(name, value, None)
            for name, (value, given) in _options(shown).items()
            if given and name != "action"
        )
    return RuleChange(
        id=rule,
        action=shown.action,
        target=shown.target,
        options=options,
        before=before.matches.get(rule, Match()),
        after=after.matches.get(rule, Match()),
    )


def _warnings(
    before: MatchedRules, after: MatchedRules, chains: Sequence[ChainChange], lost: Sequence[str]
) -> Iterator[DiffWarning]:
    """Yield the warnings, the worst first, without those that were true before the change."""
    for rule in after.rules:
        known = set(map(_key, before.obstacles(rule))) if rule in before.rules else set()
        for found in after.obstacles(rule):
            if _key(found) not in known:
                yield DiffWarning(found.kind, (rule,), detail=found.text)
    if lost:
        yield DiffWarning("lost-protection", names=tuple(lost))
    yield from _weakened(before, after, frozenset(lost))
    # Many tensors share few distinct chains.
    sides = {(chain.before, chain.after) for chain in chains}
    reordered = {side for side in sides if _is_reordered(*side)}
    if names := [chain.name for chain in chains if (chain.before, chain.after) in reordered]:
        ids = [rule for rule in after.rules if rule in before.rules]
        yield DiffWarning("order", tuple(ids), tuple(names))


def _key(found: Obstacle) -> tuple[str, str]:
    # A rule that matched nothing before is no news, whatever its pattern.
    return found.kind, "" if found.kind == "no-match" else found.text


def _weakened(
    before: MatchedRules, after: MatchedRules, lost: Collection[str]
) -> Iterator[DiffWarning]:
    """Yield the traps and freezes that do less for some tensors now, and that no rule of their action replaces."""
    names: dict[tuple[Kind, str, str], list[str]] = {}

    @cache  # many tensors share few distinct chains
    def gone(old: Ids, new: Ids) -> list[tuple[Kind, str, str]]:
        there = {after.rules[other].action for other in new}
        holding = {after.rules[other].action for other in new if _holds_back(after.rules[other])}
        found: list[tuple[Kind, str, str]] = []
        for rule in (before.rules[one] for one in old):
            if isinstance(rule, FreezeRule) and rule.action not in there:
                found.append(("unfrozen", rule.id, rule.action))
            elif isinstance(rule, TrapRule) and rule.action not in there:
                found.append(("lost-trap", rule.id, rule.action))
            elif _holds_back(rule) and rule.action not in holding:
                found.append(("weaker-trap", rule.id, rule.action))
        return found

    for name, chain in before.chains.items():
        for one in gone(chain, after.chains.get(name, ())):
            if one[0] != "lost-trap" or name not in lost:
                names.setdefault(one, []).append(name)
    for (kind, rule, action), concerned in names.items():
        yield DiffWarning(kind, (rule,), tuple(concerned), action)


def _holds_back(rule: Rule) -> bool:
    """Tell whether a trap keeps its finding from the weights."""
    return isinstance(rule, TrapRule) and rule.then != "warn"


def _is_reordered(before: Ids, after: Ids) -> bool:
    """Tell whether the rules that a tensor keeps take effect in another order now."""
    both = set(before) & set(after)
    return [rule for rule in before if rule in both] != [rule for rule in after if rule in both]


def protects(rule: Rule) -> bool:
    """Tell whether a rule edits, traps or freezes; other rules only observe."""
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


def changed_options(old: Rule, new: Rule) -> tuple[OptionChange, ...]:
    """Return the options whose meaning differs."""
    before, after = _options(old), _options(new)
    given = (name for side in (before, after) for name, option in side.items() if option.given)
    changes = []
    for name in dict.fromkeys(given):
        first, second = (side[name].value if name in side else None for side in (before, after))
        # The order of a list has no effect on what the rule selects.
        same = first == second or (
            isinstance(first, list) and sorted(first) == sorted(second or ())
        )
        if not same:
            changes.append(OptionChange(name, first, second))
    return tuple(changes)


class _Option(NamedTuple):
    value: Any  # as in a rule file
    given: bool  # differs from the default


def _options(rule: Rule) -> dict[str, _Option]:
    """Return the options of a rule by name, with dots into mappings.

    ``at`` and ``tensor`` are always given if the rule uses them: their defaults depend on the rule, and
    writing a default out is no difference.
    """
    options = dict(_fields(rule))
    options["action"] = _Option(rule.action, given=True)
    for name in ("id", "at", "tensor"):
        del options[name]
    if rule.target != "params" or not rule.ref.grad:
        options["tensor"] = _Option(str(rule.ref), given=True)
    elif rule.takes_at:
        options["at"] = _Option(rule.point, given=True)
    return options


def _fields(options: Options, within: str = "") -> Iterator[tuple[str, _Option]]:
    for key, info in type(options).model_fields.items():
        name, value = f"{within}{info.alias or key}", getattr(options, key)
        if isinstance(value, Steps):
            plain = value.model_dump(by_alias=True, exclude_defaults=True) or None
            yield name, _Option(plain, given=plain is not None)
        elif isinstance(value, Options):
            yield from _fields(value, f"{name}.")
        else:
            shown = list(dict.fromkeys(value)) if isinstance(value, tuple) else value
            if key == "dtype" and value is not None:
                shown = value.removeprefix("torch.")
            yield name, _Option(shown, given=value != info.default)
