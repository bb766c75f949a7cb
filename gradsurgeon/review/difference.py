"""Compare two rule sets on the names of a model: the effect of the change. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradsurgeon.planning import Manifest
from gradsurgeon.review.diff_warnings import DiffWarning, warnings
from gradsurgeon.review.matched_rules import (
    ChainChange,
    Match,
    MatchedRules,
    Matcher,
    changed_chains,
    protects,
)
from gradsurgeon.review.rule_changes import OptionChange, RulePairs, pair_rules
from gradsurgeon.schema import RuleSet


@dataclass(frozen=True, slots=True)
class RuleChange:
    id: str  # in the new file; for a removed rule, in the old file
    old_id: str  # empty for an added rule
    action: str
    target: str
    options: tuple[
        OptionChange, ...
    ]  # the changed options; for an added or removed rule, the given ones
    before: Match  # no match for an added rule
    after: Match  # no match for a removed rule


@dataclass(frozen=True)
class Difference:
    old: RuleSet
    new: RuleSet
    manifest: Manifest
    added: tuple[RuleChange, ...]
    removed: tuple[RuleChange, ...]
    changed: tuple[RuleChange, ...]  # rules with other options
    renamed: tuple[RuleChange, ...]  # rules with another id and equal options
    unchanged: tuple[str, ...]
    order_before: tuple[str, ...]  # the rules of both sides by their new ids, in the old order ...
    order_after: tuple[str, ...]  # ... and in the new one
    params: tuple[ChainChange, ...]  # in model order
    tensors: tuple[ChainChange, ...]  # of modules and tags, such as ``conv1 output.grad``
    covered: tuple[int, int]  # number of parameters with rules, before and after
    lost: tuple[
        str, ...
    ]  # parameters that rules edited, trapped or froze before, and none does now
    warnings: tuple[DiffWarning, ...]  # the worst first

    @property
    def order_changed(self) -> bool:
        return self.order_before != self.order_after

    @cached_property
    def in_effect(self) -> bool:
        """Whether a training run could show a difference; an id counts, an order without effect does not."""
        rules = self.added or self.removed or self.changed or self.renamed
        return bool(rules or self.params or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        return {
            "version": 1,
            "added": [_one_side(change, change.after) for change in self.added],
            "removed": [_one_side(change, change.before) for change in self.removed],
            "changed": [_both_sides(change) for change in self.changed],
            "renamed": [_both_sides(change) for change in self.renamed],
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
        "was": change.old_id,
        "fields": [option.to_dict() for option in change.options],
        "params_before": change.before.names,
        "params_after": change.after.names,
        "elements_before": change.before.elements,
        "elements_after": change.after.elements,
    }


def compare(old: RuleSet, new: RuleSet, manifest: Manifest) -> Difference:
    """Return the effect of a change of rules on a model; a rule that matches nothing is a warning."""
    matcher = Matcher(manifest)
    before, after = MatchedRules(old, matcher), MatchedRules(new, matcher)
    pairs = pair_rules(before, after)
    order = {param.name: position for position, param in enumerate(manifest.params)}
    chains = changed_chains(before, after, pairs.new_ids)
    chains.sort(key=lambda chain: order.get(chain.name, len(order)))
    protected = (side.params_under(protects) for side in (before, after))
    lost = sorted(frozenset.difference(*protected), key=order.__getitem__)
    order_after = tuple(rule for rule in after.rules if rule in pairs.old_ids)
    both = [_rule_change(pairs, pairs.old_ids[rule], rule) for rule in order_after]
    added = [rule for rule in after.rules if rule not in pairs.old_ids]
    removed = [rule for rule in before.rules if rule not in pairs.new_ids]
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        added=tuple(_rule_change(pairs, "", rule) for rule in added),
        removed=tuple(_rule_change(pairs, rule, "") for rule in removed),
        changed=tuple(change for change in both if change.options),
        renamed=tuple(change for change in both if change.old_id != change.id),
        unchanged=tuple(
            change.id for change in both if change.old_id == change.id and not change.options
        ),
        order_before=tuple(pairs.new_ids[rule] for rule in before.rules if rule in pairs.new_ids),
        order_after=order_after,
        params=tuple(chain for chain in chains if chain.name in order),
        tensors=tuple(chain for chain in chains if chain.name not in order),
        covered=(len(before.params_under()), len(after.params_under())),
        lost=tuple(lost),
        warnings=tuple(warnings(pairs, chains, lost)),
    )


def _rule_change(pairs: RulePairs, old: str, new: str) -> RuleChange:
    rule = pairs.after.rules[new] if new else pairs.before.rules[old]
    return RuleChange(
        id=rule.id,
        old_id=old,
        action=rule.action,
        target=rule.target,
        options=pairs.option_changes(old, new),
        before=pairs.before.matches[old] if old else Match(),
        after=pairs.after.matches[new] if new else Match(),
    )
