"""Compare two rule sets on the names of a model: the effect of the change. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gradsurgeon.actions import FreezeRule, Rule, TrapRule
from gradsurgeon.cli.review import on_run
from gradsurgeon.cli.review.effects import (
    Change,
    Meaning,
    OrderChange,
    meaning_of,
    order_changes,
)
from gradsurgeon.common._grouping import grouped, names_of
from gradsurgeon.language.planning import Manifest, Match, MatchedRules, Matcher, Obstacle
from gradsurgeon.language.schema import RuleSet

if TYPE_CHECKING:
    from gradsurgeon.report.evidence.run_norms import RunNorms
    from gradsurgeon.report.evidence.told import Told


_AS_FORM = methodcaller("_asdict")
Sign = Literal["+", "-", "~"]  # added, removed, changed
SIGNS: Mapping[Sign, str] = {"+": "added", "-": "removed", "~": "changed"}


class RuleChange(NamedTuple):
    """What became of one rule."""

    sign: Sign
    rule: Rule  # as it is now; a removed one as it was
    old_id: str  # another one for a renamed rule
    # The changed options; for an added or removed rule, the given ones.
    options: Sequence[Change]
    before: Match  # no match for an added rule
    after: Match  # no match for a removed rule
    effects: Sequence[Meaning]

    @property
    def id(self) -> str:
        return self.rule.id

    def to_dict(self) -> dict[str, Any]:
        target = self.rule.target
        form: dict[str, Any] = {"id": self.id, "action": self.rule.action, "target": target}
        if self.sign == "~":
            form["fields"] = list(map(_AS_FORM, self.options))
            form["effect"] = list(map(_AS_FORM, self.effects))
            form["params_before"] = self.before.names
            form["params_after"] = self.after.names
            form["elements_before"] = self.before.elements
            form["elements_after"] = self.after.elements
            return form
        match = self.after if self.sign == "+" else self.before
        form |= {"params": (), "modules": (), "elements": match.elements}
        if target != "tensors":
            form[target] = match.names
        return form


class Difference(NamedTuple):
    """What became of the rules on the names of a model."""

    old: RuleSet
    new: RuleSet
    manifest: Manifest
    rules: Sequence[RuleChange]  # added, then removed, then changed
    orders: Sequence[OrderChange]  # pairs of rules that act in another order on some tensor
    # Parameters come in model order, then modules and tags, such as ``conv1 output.grad``.
    chains: Sequence[Change]
    covered: tuple[int, int]  # number of parameters with rules, before and after
    # Parameters that a rule edited, trapped or froze before, and no rule does now.
    lost: Sequence[str]
    # Further parameters for which a trap stopped or skipped steps before, and no trap does now.
    untrapped: Sequence[str]
    # The same for traps that stay, and look in fewer steps: what the trap did and does, and on which parameters.
    disarmed: Sequence[tuple[RuleChange, Sequence[str]]]
    # Why training newly ends before its first step, with the rule.
    obstacles: Sequence[tuple[str, Obstacle]]
    # The rules of each side, by the new ids, and what they would have done in a recorded run, if one was named.
    told: tuple[Mapping[str, Told], Mapping[str, Told]]

    @property
    def in_effect(self) -> bool:
        return bool(self.rules or self.chains)

    def on(self, rule: str) -> tuple[Told | None, Told | None]:
        """Return what a rule would have done before and after; ``None`` for a side that lacks it."""
        before, after = self.told
        return before.get(rule), after.get(rule)

    def _on_form(self, rule: str) -> dict[str, Any] | None:
        before, after = self.on(rule)
        if not (before or after):
            return None
        return {"before": before and before.to_dict(), "after": after and after.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        form: dict[str, Any] = {"version": 1}
        form |= {key: [] for key in SIGNS.values()}
        for change in self.rules:
            entry = change.to_dict()
            on = self._on_form(change.id)
            if on:
                entry["on"] = on
            form[SIGNS[change.sign]].append(entry)
        form["order"] = []
        for order in self.orders:
            entry = order._asdict()
            on = {name: self._on_form(entry[name]) for name in ("first", "second")}
            if any(on.values()):
                entry["on"] = on
            form["order"].append(entry)
        params = set(names_of(self.manifest.params))
        form |= {"params": [], "tensors": []}
        for chain in self.chains:
            form["params" if chain.name in params else "tensors"].append(chain._asdict())
        form["lost_protection"] = self.lost
        form["lost_trap"] = self.untrapped
        form["less_often_trapped"] = [
            {"rule": change.id, "params": names} for change, names in self.disarmed
        ]
        form["covered"] = dict(zip(("before", "after"), self.covered, strict=True))
        form["model"] = {"params": len(params), "elements": self.manifest.elements}
        form["warnings"] = [
            {"kind": obstacle.kind, "rule": rule, "detail": obstacle.text}
            for rule, obstacle in self.obstacles
        ]
        form["in_effect"] = self.in_effect
        return form


def compare(
    old: RuleSet, new: RuleSet, manifest: Manifest, run: RunNorms | None = None
) -> Difference:
    """Return the difference of two rule sets, with ``run`` also what their rules would have done there."""
    new_ids = _renamed(old.rules, new.rules)
    old_ids = {new_id: old_id for old_id, new_id in new_ids.items()}
    # Both sides have the new ids from here on.
    kept = [rule.model_copy(update={"id": new_ids.get(rule.id, rule.id)}) for rule in old.rules]
    matcher = Matcher(manifest)
    before = MatchedRules(replace(old, rules=tuple(kept)), matcher)
    after = MatchedRules(new, matcher)
    params = names_of(manifest.params)
    chains = list(_chain_changes(before, after, params))
    orders = order_changes(chains)
    changes = []
    for rule_id in after.rules | before.rules:
        change = _rule_change(before, after, rule_id, old_ids.get(rule_id, rule_id), orders)
        if change.sign != "~" or change.effects:
            changes.append(change)
    unprotected = _under(before, protects) - _under(after, protects)
    unstopped = _under(before, stops) - _under(after, stops) - unprotected
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        rules=sorted(changes, key=lambda change: "+-~".index(change.sign)),
        orders=orders,
        chains=chains,
        covered=(len(before.chains.keys() & params), len(after.chains.keys() & params)),
        lost=list(filter(unprotected.__contains__, params)),
        untrapped=list(filter(unstopped.__contains__, params)),
        disarmed=list(_disarmed(before, after, changes, unprotected | unstopped)),
        obstacles=list(_new_obstacles(before, after)),
        told=(on_run.tried(before, run), on_run.tried(after, run)),
    )


def _renamed(old: Sequence[Rule], new: Sequence[Rule]) -> dict[str, str]:
    """Return the new id of each rule that has another one: the same action on the same tensors."""
    known = {rule.id for rule in old}
    kept = {rule.id for rule in new}
    come = grouped([rule for rule in new if rule.id not in known], _selection)
    gone = grouped([rule for rule in old if rule.id not in kept], _selection)
    new_ids = {}
    # A file may have thousands of rules, so they are not compared in pairs.
    for selection, rules in gone.items():
        for rule, renamed in zip(rules, come.get(selection, ()), strict=False):
            new_ids[rule.id] = renamed.id
    return new_ids


def _selection(rule: Rule) -> str:
    options = _given_options(rule)
    keys = (rule.target, "tensor", "exclude", "where", "model")
    selecting = [_unordered(options.get(key)) for key in keys]
    return json.dumps([rule.action, rule.target, *selecting], sort_keys=True)


def _chain_changes(
    before: MatchedRules, after: MatchedRules, params: Iterable[str]
) -> Iterator[Change]:
    for name in dict.fromkeys((*params, *before.chains, *after.chains)):
        old = before.chains.get(name, ())
        new = after.chains.get(name, ())
        if old != new:
            yield Change(name, old, new)


def _under(side: MatchedRules, is_wanted: Callable[[Rule], bool]) -> set[str]:
    """Return the names on which a wanted rule acts."""
    names: set[str] = set()
    for rule in filter(is_wanted, side.rules.values()):
        names |= side.matches[rule.id].members
    return names


def _disarmed(
    before: MatchedRules, after: MatchedRules, changes: Iterable[RuleChange], known: set[str]
) -> Iterator[tuple[RuleChange, Sequence[str]]]:
    """Yield the traps that look in fewer steps, with the parameters for which no other trap looks in all of them."""
    for change in changes:
        old = before.rules.get(change.id)
        if change.sign != "~" or old is None or old.target != "params" or not stops(old):
            continue
        covering = set(known)
        for rule in after.rules.values():
            if stops(rule) and rule.steps.covers(old.steps):
                covering |= after.matches[rule.id].members
        names = [name for name in change.before.names if name not in covering]
        if names:
            yield change, names


def _rule_change(
    before: MatchedRules,
    after: MatchedRules,
    rule_id: str,
    old_id: str,
    orders: Iterable[OrderChange],
) -> RuleChange:
    old = before.rules.get(rule_id)
    new = after.rules.get(rule_id)
    options = changed_options(old, new)
    sign: Sign = "+" if old is None else "-"
    effects: list[Meaning] = []
    if old is not None and new is not None:
        sign = "~"
        if old_id != rule_id:
            effects.append(Meaning("renamed", "id", None, f"renamed from {old_id}"))
        effects += [meaning_of(old, new, option) for option in options]
    if effects:
        own = [order for order in orders if rule_id in order[:2]]
        effects += [Meaning("order", "", None, order.text) for order in own]
    return RuleChange(
        sign=sign,
        rule=new or before.rules[rule_id],
        old_id=old_id,
        options=options,
        before=before.matches.get(rule_id, Match()),
        after=after.matches.get(rule_id, Match()),
        effects=effects,
    )


def _new_obstacles(before: MatchedRules, after: MatchedRules) -> Iterator[tuple[str, Obstacle]]:
    """Yield why training ends early, of rules for which it did not end early for a reason of that kind before."""
    for rule_id in after.rules:
        known = []
        if rule_id in before.rules:
            known = [obstacle.kind for obstacle in before.obstacles(rule_id)]
        for obstacle in after.obstacles(rule_id):
            if obstacle.kind not in known:
                yield rule_id, obstacle


def protects(rule: Rule) -> bool:
    return rule.edits or isinstance(rule, TrapRule | FreezeRule)


def stops(rule: Rule) -> bool:
    # A trap that clips lets NaN through.
    return isinstance(rule, TrapRule) and rule.then != "warn" and not rule.edits


def changed_options(old: Rule | None, new: Rule | None) -> list[Change]:
    """Return the options that differ, or the given options of a rule that only one side has."""
    before = _given_options(old)
    after = _given_options(new)
    if old is not None and new is not None and old.action != new.action:
        before = {"action": old.action, **before}
        after["action"] = new.action
    changes = []
    for name in before | after:
        change = Change(
            name, before.get(name, _default(old, name)), after.get(name, _default(new, name))
        )
        if _unordered(change.before) != _unordered(change.after):
            changes.append(change)
    return changes


def _unordered(value: object) -> object:
    # The order of a list has no effect on what the rule selects.
    if isinstance(value, list):
        return sorted(set(value))
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
        mode="json", by_alias=True, exclude_defaults=True, exclude={"id", "action", "at", "tensor"}
    )
    for name, value in options.pop("above", {}).items():
        options[f"above.{name}"] = value
    if rule.target != "params" or not rule.ref.grad:
        options["tensor"] = str(rule.ref)
    elif rule.takes_at:
        options["at"] = rule.point
    return options
