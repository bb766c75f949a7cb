"""Compare two rule sets on the names of a model: the effect of the change. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradsurgeon.actions import FreezeRule, Rule, TrapRule
from gradsurgeon.language.planning import Manifest, Match, MatchedRules, Matcher, Obstacle
from gradsurgeon.language.schema import RuleSet

Ids = tuple[str, ...]


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
    name: str
    before: Ids
    after: Ids


@dataclass(frozen=True)
class Difference:
    old: RuleSet
    new: RuleSet
    manifest: Manifest
    added: tuple[RuleChange, ...]
    removed: tuple[RuleChange, ...]
    changed: tuple[RuleChange, ...]  # rules with other options
    order_changed: bool  # of the rules of both sides, in the file
    params: tuple[ChainChange, ...]  # in model order
    tensors: tuple[ChainChange, ...]  # of modules and tags, such as ``conv1 output.grad``
    covered: tuple[int, int]  # number of parameters with rules, before and after
    # Parameters that rules edited, trapped or froze before, and none does now.
    lost: tuple[str, ...]
    # Further parameters that a trap stopped or skipped steps for before, and none does now.
    untrapped: tuple[str, ...]
    # Why training newly ends before its first step, with the rule.
    obstacles: tuple[tuple[str, Obstacle], ...]

    @property
    def in_effect(self) -> bool:
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
            "params": [chain._asdict() for chain in self.params],
            "tensors": [chain._asdict() for chain in self.tensors],
            "lost_protection": self.lost,
            "lost_trap": self.untrapped,
            "covered": {"before": self.covered[0], "after": self.covered[1]},
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "warnings": [
                {"kind": found.kind, "rule": rule, "detail": found.text}
                for rule, found in self.obstacles
            ],
            "in_effect": self.in_effect,
        }


def _scope(change: RuleChange) -> dict[str, Any]:
    return {"id": change.id, "action": change.action, "target": change.target}


def _one_side(change: RuleChange, match: Match) -> dict[str, Any]:
    return {
        **_scope(change),
        "params": match.names if change.target == "params" else (),
        "modules": match.names if change.target == "modules" else (),
        "elements": match.elements,
    }


def _both_sides(change: RuleChange) -> dict[str, Any]:
    return {
        **_scope(change),
        "fields": [option._asdict() for option in change.options],
        "params_before": change.before.names,
        "params_after": change.after.names,
        "elements_before": change.before.elements,
        "elements_after": change.after.elements,
    }


def compare(old: RuleSet, new: RuleSet, manifest: Manifest) -> Difference:
    matcher = Matcher(manifest)
    before = MatchedRules(old, matcher)
    after = MatchedRules(new, matcher)
    order = {param.name: position for position, param in enumerate(manifest.params)}
    chains = []
    for name in dict.fromkeys((*before.chains, *after.chains)):
        chain = ChainChange(name, before.chains.get(name, ()), after.chains.get(name, ()))
        if chain.before != chain.after:
            chains.append(chain)
    chains.sort(key=lambda chain: order.get(chain.name, len(order)))
    lost = _params_under(before, protects) - _params_under(after, protects)
    untrapped = _params_under(before, stops) - _params_under(after, stops)
    changes = [_rule_change(before, after, rule) for rule in (after.rules | before.rules)]
    both = [rule for rule in after.rules if rule in before.rules]
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        added=tuple(change for change in changes if change.id not in before.rules),
        removed=tuple(change for change in changes if change.id not in after.rules),
        changed=tuple(change for change in changes if change.id in both and change.options),
        order_changed=both != [rule for rule in before.rules if rule in after.rules],
        params=tuple(chain for chain in chains if chain.name in order),
        tensors=tuple(chain for chain in chains if chain.name not in order),
        covered=(len(_params_under(before)), len(_params_under(after))),
        lost=tuple(sorted(lost, key=order.__getitem__)),
        untrapped=tuple(sorted(untrapped - lost, key=order.__getitem__)),
        obstacles=tuple(_new_obstacles(before, after)),
    )


def _params_under(
    side: MatchedRules, wanted: Callable[[Rule], bool] = lambda _: True
) -> frozenset[str]:
    rules = [rule for rule in side.rules.values() if rule.target == "params" and wanted(rule)]
    return frozenset().union(*(side.matches[rule.id].members for rule in rules))


def _rule_change(before: MatchedRules, after: MatchedRules, rule: str) -> RuleChange:
    old = before.rules.get(rule)
    new = after.rules.get(rule)
    shown = new or old
    assert shown is not None  # noqa: S101 # the id is that of one side
    return RuleChange(
        id=rule,
        action=shown.action,
        target=shown.target,
        options=changed_options(old, new),
        before=before.matches.get(rule, Match()),
        after=after.matches.get(rule, Match()),
    )


def _new_obstacles(before: MatchedRules, after: MatchedRules) -> Iterator[tuple[str, Obstacle]]:
    for rule in after.rules:
        known = set(map(_key, before.obstacles(rule))) if rule in before.rules else set()
        yield from ((rule, found) for found in after.obstacles(rule) if _key(found) not in known)


def _key(found: Obstacle) -> tuple[str, str]:
    # A rule that matched nothing before is no news, whatever its pattern.
    return found.kind, "" if found.kind == "no-match" else found.text


def protects(rule: Rule) -> bool:
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


def stops(rule: Rule) -> bool:
    return isinstance(rule, TrapRule) and getattr(rule, "then", "") != "warn"


def changed_options(old: Rule | None, new: Rule | None) -> tuple[OptionChange, ...]:
    """Return the options that differ; the given options of a rule that one side alone has."""
    before = {} if old is None else _given(old)
    after = {} if new is None else _given(new)
    changes = []
    if old is not None and new is not None and old.action != new.action:
        changes.append(OptionChange("action", old.action, new.action))
    for name in before | after:
        one = before.get(name, _default(old, name))
        other = after.get(name, _default(new, name))
        if _unordered(one) != _unordered(other):
            changes.append(OptionChange(name, one, other))
    return tuple(changes)


def _unordered(value: object) -> object:
    # The order of a list has no effect on what the rule selects.
    return sorted(value) if isinstance(value, list) else value


def _default(rule: Rule | None, name: str) -> object:
    value = getattr(rule, name, None)
    return value if isinstance(value, str | int | float) else None


def _given(rule: Rule) -> dict[str, Any]:
    plain = rule.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    options = {
        key: list(dict.fromkeys(value)) if isinstance(value, list) else value
        for key, value in plain.items()
        if key not in {"id", "at", "tensor"}
    }
    if rule.target != "params" or not rule.ref.grad:
        options["tensor"] = str(rule.ref)
    elif rule.takes_at:
        options["at"] = rule.point
    return options
