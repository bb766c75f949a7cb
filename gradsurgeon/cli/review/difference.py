"""Compare two rule sets on the names of a model: the effect of the change. Pure."""

from collections.abc import Callable, Iterable, Iterator
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
    # Parameters that a rule edited, trapped or froze before, and no rule does now.
    lost: tuple[str, ...]
    # Further parameters for which a trap stopped or skipped steps before, and no trap does now.
    untrapped: tuple[str, ...]
    # Why training newly ends before its first step, with the rule.
    obstacles: tuple[tuple[str, Obstacle], ...]

    @property
    def in_effect(self) -> bool:
        return any((self.added, self.removed, self.changed, self.params, self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        covered_before, covered_after = self.covered
        warnings = []
        for rule_id, obstacle in self.obstacles:
            warning = {"kind": obstacle.kind, "rule": rule_id, "detail": obstacle.text}
            warnings.append(warning)
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
            "covered": {"before": covered_before, "after": covered_after},
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "warnings": warnings,
            "in_effect": self.in_effect,
        }


def _scope(change: RuleChange) -> dict[str, Any]:
    return {"id": change.id, "action": change.action, "target": change.target}


def _one_side(change: RuleChange, match: Match) -> dict[str, Any]:
    side = _scope(change)
    side["params"] = ()
    side["modules"] = ()
    if change.target != "tensors":
        side[change.target] = match.names
    side["elements"] = match.elements
    return side


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
    added = []
    removed = []
    changed = []
    for rule_id in after.rules | before.rules:
        change = _rule_change(before, after, rule_id)
        if rule_id not in before.rules:
            added.append(change)
        elif rule_id not in after.rules:
            removed.append(change)
        elif change.options:
            changed.append(change)
    order_before = [rule_id for rule_id in before.rules if rule_id in after.rules]
    order_after = [rule_id for rule_id in after.rules if rule_id in before.rules]
    param_names = [param.name for param in manifest.params]
    tensor_names = dict.fromkeys((*before.chains, *after.chains))
    for name in param_names:
        tensor_names.pop(name, None)
    lost = _params_under(before, protects) - _params_under(after, protects)
    untrapped = _params_under(before, stops) - _params_under(after, stops) - lost
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        added=tuple(added),
        removed=tuple(removed),
        changed=tuple(changed),
        order_changed=order_before != order_after,
        params=tuple(_chain_changes(before, after, param_names)),
        tensors=tuple(_chain_changes(before, after, tensor_names)),
        covered=(len(_params_under(before)), len(_params_under(after))),
        lost=tuple(name for name in param_names if name in lost),
        untrapped=tuple(name for name in param_names if name in untrapped),
        obstacles=tuple(_new_obstacles(before, after)),
    )


def _chain_changes(
    before: MatchedRules, after: MatchedRules, names: Iterable[str]
) -> Iterator[ChainChange]:
    for name in names:
        old = before.chains.get(name, ())
        new = after.chains.get(name, ())
        if old != new:
            yield ChainChange(name, old, new)


def _params_under(
    side: MatchedRules, is_wanted: Callable[[Rule], bool] | None = None
) -> frozenset[str]:
    """Return the parameters that any rule matches, or any wanted one."""
    matched = []
    for rule in side.rules.values():
        if rule.target != "params":
            continue
        if is_wanted is None or is_wanted(rule):
            matched.append(side.matches[rule.id].members)
    return frozenset().union(*matched)


def _rule_change(before: MatchedRules, after: MatchedRules, rule_id: str) -> RuleChange:
    old = before.rules.get(rule_id)
    new = after.rules.get(rule_id)
    rule = after.rules.get(rule_id, old)
    assert rule is not None  # noqa: S101 # the id is from one of the sides
    return RuleChange(
        id=rule_id,
        action=rule.action,
        target=rule.target,
        options=changed_options(old, new),
        before=before.matches.get(rule_id, Match()),
        after=after.matches.get(rule_id, Match()),
    )


def _new_obstacles(before: MatchedRules, after: MatchedRules) -> Iterator[tuple[str, Obstacle]]:
    for rule_id in after.rules:
        known: set[tuple[str, str]] = set()
        if rule_id in before.rules:
            known.update(map(_obstacle_key, before.obstacles(rule_id)))
        for obstacle in after.obstacles(rule_id):
            if _obstacle_key(obstacle) not in known:
                yield rule_id, obstacle


def _obstacle_key(obstacle: Obstacle) -> tuple[str, str]:
    if obstacle.kind == "no-match":
        # A rule that matched nothing before is no news, whatever its pattern.
        return obstacle.kind, ""
    return obstacle.kind, obstacle.text


def protects(rule: Rule) -> bool:
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


def stops(rule: Rule) -> bool:
    return isinstance(rule, TrapRule) and getattr(rule, "then", "") != "warn"


def changed_options(old: Rule | None, new: Rule | None) -> tuple[OptionChange, ...]:
    """Return the options that differ, or the given options of a rule that only one side has."""
    before = _given_options(old)
    after = _given_options(new)
    changes = []
    if old is not None and new is not None and old.action != new.action:
        changes.append(OptionChange("action", old.action, new.action))
    for name in before | after:
        value_before = before.get(name, _default(old, name))
        value_after = after.get(name, _default(new, name))
        if _unordered(value_before) != _unordered(value_after):
            changes.append(OptionChange(name, value_before, value_after))
    return tuple(changes)


def _unordered(value: object) -> object:
    # The order of a list has no effect on what the rule selects.
    if isinstance(value, list):
        return sorted(value)
    return value


def _default(rule: Rule | None, name: str) -> object:
    value = getattr(rule, name, None)
    if isinstance(value, str | int | float):
        return value
    return None


def _given_options(rule: Rule | None) -> dict[str, Any]:
    if rule is None:
        return {}
    options = rule.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"id", "at", "tensor"}
    )
    for key, value in options.items():
        if isinstance(value, list):
            options[key] = list(dict.fromkeys(value))
    if rule.target != "params" or not rule.ref.grad:
        options["tensor"] = str(rule.ref)
    elif rule.takes_at:
        options["at"] = rule.point
    return options
