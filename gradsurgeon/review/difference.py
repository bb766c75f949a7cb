"""Two rule sets and the names of a model -> what the change from one to the other does. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradsurgeon.planning import Manifest
from gradsurgeon.review.effects import Effects, Matcher
from gradsurgeon.review.fields import Field
from gradsurgeon.review.findings import Finding, findings
from gradsurgeon.review.pairing import Pairing, pair
from gradsurgeon.schema import RuleSet


@dataclass(frozen=True, slots=True)
class Change:
    """One rule that is not the same on both sides.

    Attributes:
        id: in the new file; of a removed rule in the old one.
        was: its id in the old file; empty for an added rule.
        action: likewise.
        target: ``params``, ``modules`` or ``tensors``.
        fields: the options that differ; of an added or removed rule all that it gives.
        before: the names that it matched, in model order; tags by their patterns.
        after: the names that it matches now.
        elements_before: elements of the parameters before.
        elements_after: the same now.
    """

    id: str
    was: str
    action: str
    target: str
    fields: tuple[Field, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    elements_before: int
    elements_after: int

    @property
    def renamed(self) -> bool:
        """Whether it is on both sides under different ids."""
        return bool(self.was) and self.was != self.id


@dataclass(frozen=True, slots=True)
class Chain:
    """A tensor that goes through other rules than before, by id in order of effect."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {"name": self.name, "before": list(self.before), "after": list(self.after)}


@dataclass(frozen=True)
class Difference:
    """What a change of rules does to a model.

    Attributes:
        old: the rules before.
        new: the rules after.
        manifest: the model.
        added: rules that are new.
        removed: rules that are gone.
        changed: rules whose options differ, those among them that were renamed as well included.
        renamed: rules with another id and nothing else.
        unchanged: ids of the others.
        order_before: the ids of the rules on both sides, by their new names, in the old order ...
        order_after: ... and in the new one.
        params: parameters whose chain of rules differs, in model order.
        tensors: the same for tensors of modules and tags, as ``conv1 output.grad``.
        covered: how many parameters have rules, before and after.
        lost: parameters that rules edited, trapped or froze, and no rule does now.
        findings: what a reviewer must not miss, the worst first.
    """

    old: RuleSet
    new: RuleSet
    manifest: Manifest
    added: tuple[Change, ...]
    removed: tuple[Change, ...]
    changed: tuple[Change, ...]
    renamed: tuple[Change, ...]
    unchanged: tuple[str, ...]
    order_before: tuple[str, ...]
    order_after: tuple[str, ...]
    params: tuple[Chain, ...]
    tensors: tuple[Chain, ...]
    covered: tuple[int, int]
    lost: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def order_changed(self) -> bool:
        """Whether rules on both sides stand in another order."""
        return self.order_before != self.order_after

    @cached_property
    def in_effect(self) -> bool:
        """Whether anything differs that a training run could show.

        An id counts, since records go by it; an order in the file that no tensor sees does not.
        """
        rules = self.added or self.removed or self.changed or self.renamed
        return bool(rules or self.params or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, version 1."""
        return {
            "version": 1,
            "added": [_one(change, change.after, change.elements_after) for change in self.added],
            "removed": [
                _one(change, change.before, change.elements_before) for change in self.removed
            ],
            "changed": [_both(one) for one in self.changed],
            "renamed": [_both(one) for one in self.renamed],
            "order_changed": self.order_changed,
            "order": {"before": list(self.order_before), "after": list(self.order_after)},
            "params": [one.to_dict() for one in self.params],
            "tensors": [one.to_dict() for one in self.tensors],
            "lost_protection": list(self.lost),
            "covered": {"before": self.covered[0], "after": self.covered[1]},
            "model": {"params": len(self.manifest.params), "elements": self.manifest.elements},
            "warnings": [one.to_dict() for one in self.findings],
            "in_effect": self.in_effect,
        }


def _head(change: Change) -> dict[str, Any]:
    return {"id": change.id, "action": change.action, "target": change.target}


def _one(change: Change, names: Sequence[str], elements: int) -> dict[str, Any]:
    return {
        **_head(change),
        "params": list(names) if change.target == "params" else [],
        "modules": list(names) if change.target == "modules" else [],
        "elements": elements,
    }


def _both(change: Change) -> dict[str, Any]:
    return {
        **_head(change),
        "was": change.was,
        "fields": [field.to_dict() for field in change.fields],
        "params_before": list(change.before),
        "params_after": list(change.after),
        "elements_before": change.elements_before,
        "elements_after": change.elements_after,
    }


def compare(old: RuleSet, new: RuleSet, manifest: Manifest) -> Difference:
    """Return what a change of rules does to a model; rules that match nothing are findings.

    Args:
        old: the rules before.
        new: the rules after.
        manifest: the names of the model.
    """
    matcher = Matcher(manifest)
    before, after = Effects(old, matcher), Effects(new, matcher)
    pairing = pair(before, after)
    known = {name: place for place, name in enumerate(param.name for param in manifest.params)}
    chains = _chains(before, after, pairing.names)
    ranked = sorted(chains, key=lambda one: known.get(one.name, len(known)))
    lost = sorted(before.protected - after.protected, key=known.__getitem__)
    order_before = tuple(pairing.names[one] for one in before.rules if one in pairing.names)
    order_after = tuple(one for one in after.rules if one in pairing.old)
    both = [_change(before, after, was, one, pairing) for was, one in pairing.names.items()]
    place = {one: number for number, one in enumerate(order_after)}
    both.sort(key=lambda change: place[change.id])
    return Difference(
        old=old,
        new=new,
        manifest=manifest,
        added=tuple(
            _change(before, after, "", one, pairing)
            for one in after.rules
            if one not in pairing.old
        ),
        removed=tuple(
            _change(before, after, one, "", pairing)
            for one in before.rules
            if one not in pairing.names
        ),
        changed=tuple(one for one in both if one.fields),
        renamed=tuple(one for one in both if one.renamed and not one.fields),
        unchanged=tuple(one.id for one in both if not one.renamed and not one.fields),
        order_before=order_before,
        order_after=order_after,
        params=tuple(one for one in ranked if one.name in known),
        tensors=tuple(one for one in ranked if one.name not in known),
        covered=(len(before.covered), len(after.covered)),
        lost=tuple(lost),
        findings=tuple(findings(pairing, ranked, lost)),
    )


def _change(before: Effects, after: Effects, was: str, new: str, pairing: Pairing) -> Change:
    first, second = before.matches.get(was), after.matches.get(new)
    rule = after.rules[new] if new else before.rules[was]
    return Change(
        id=rule.id,
        was=was,
        action=rule.action,
        target=rule.target,
        fields=pairing.fields(was, new),
        before=first.names if first else (),
        after=second.names if second else (),
        elements_before=first.elements if first else 0,
        elements_after=second.elements if second else 0,
    )


def _chains(before: Effects, after: Effects, names: Mapping[str, str]) -> list[Chain]:
    """Return the tensors whose chain differs; that a rule has another name is no difference."""
    # Few distinct chains stand for many tensors.
    renamed = {
        chain: tuple(names.get(one, one) for one in chain) for chain in set(before.chains.values())
    }
    found = []
    for name in dict.fromkeys((*before.chains, *after.chains)):
        first, second = before.chains.get(name, ()), after.chains.get(name, ())
        if renamed.get(first, ()) != second:
            found.append(Chain(name, first, second))
    return found
