"""What a difference says in words, the same in a terminal and in a pull request."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradsurgeon.actions import written
from gradsurgeon.planning.table import NOUNS, count, fold_names
from gradsurgeon.review.diff_warnings import DiffWarning
from gradsurgeon.review.difference import Difference, RuleChange
from gradsurgeon.review.rule_changes import OptionChange

_MAX_NAMES = 6
_MAX_UNCHANGED = 10
_MAX_OVERLAPS = 10  # pairs of rules that newly change the same tensors
_MAX_CHAIN = 40  # rules of one chain
_QUOTED = (
    "params",
    "modules",
    "tensors",
    "exclude",
    "model",
    "where.module_type",
    "losses",
    "memory",
)
_USELESS = {"no-match": "matches nothing in", "cannot-act": "cannot act on"}
_ENDS = "training with these rules ends with an error before its first step"

Ids = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phrases:
    """What one difference says."""

    difference: Difference
    code: Callable[[str], str]  # writes what a user wrote, escaped for where it goes
    arrow: str  # stands between before and after

    def summary(self) -> str:
        found = self.difference
        if not found.in_effect:
            return "no difference in effect"
        parts = [
            f"{len(found.added)} added" * bool(found.added),
            f"{len(found.removed)} removed" * bool(found.removed),
            f"{len(found.changed)} changed" * bool(found.changed),
            f"{len(found.renamed)} only renamed" * bool(found.renamed),
            "other order" * found.order_changed,
        ]
        rules = ", ".join(filter(None, parts)) or "other chains"
        before, after = (f"{number:,}" for number in found.covered)
        covered = f"{self._from_to(before, after)} of {len(found.manifest.params):,}"
        lost = f"; {len(found.lost):,} lost all protection" * bool(found.lost)
        return f"{rules}; {covered} parameters under rules{lost}"

    def warnings(self) -> Iterator[str]:
        """Yield the warnings. Of many pairs of rules that overlap, only the first are written out."""
        warnings = self.difference.warnings
        overlaps = [warning for warning in warnings if warning.kind == "overlap"]
        left_out = {warning.rules for warning in overlaps[_MAX_OVERLAPS:]}
        for warning in warnings:
            is_left_out = warning.kind == "overlap" and warning.rules in left_out
            if warning.kind != "more-overlaps" and not is_left_out:
                yield self._warning(warning)
        if more := overlaps[_MAX_OVERLAPS:]:
            over = any(warning.kind == "more-overlaps" for warning in warnings)
            first, second = map(self.code, more[0].rules)
            yield (
                f"{'Over ' * over}{count(len(more), 'other pair')} of rules now change tensors together, "
                f"such as {first} and {second}: `--format json` has {'the first' if over else 'all'}."
            )

    def _warning(self, warning: DiffWarning) -> str:
        rules = [self.code(rule) for rule in warning.rules]
        names = self.names(warning.names)
        if warning.kind == "lost-protection":
            what = f"{count(len(warning.names), 'parameter')} lost all protection"
            return f"{what}: no rule edits, freezes or traps the gradient now: {names}."
        if warning.kind in ("lost-trap", "weaker-trap"):
            return self._of_trap(warning, rules[0], names)
        if said := _USELESS.get(warning.kind):
            return f"{rules[0]} {said} this model: {_ENDS}. {self.code(warning.detail)}"
        if warning.kind == "expect":
            broken = "it breaks its own `expect`, so"
            return f"{rules[0]} {warning.detail} parameters: {broken} {_ENDS}."
        if warning.kind == "overlap":
            first, second = warning.detail.split(", then ")
            target = next(r.target for r in self.difference.new.rules if r.id == warning.rules[0])
            shared = f"{count(len(warning.names), NOUNS[target])}: {names}"
            order = f"First {rules[0]} ({first}), then {rules[1]} ({second})."
            return f"{rules[0]} and {rules[1]} now both change {shared}. {order}"
        chains = (*self.difference.params, *self.difference.tensors)
        example = next(chain for chain in chains if chain.name == warning.names[0])
        before, now = self.chain(example.before), self.chain(example.after)
        what = f"the order of effects changed for {count(len(warning.names), 'tensor')}"
        return f"{what}: {names}. Such as {before} before, {now} now."

    def _of_trap(self, warning: DiffWarning, rule: str, names: str) -> str:
        params = {param.name for param in self.difference.manifest.params}
        noun = "parameter" if params.issuperset(warning.names) else "tensor"
        what = f"{count(len(warning.names), noun)}: {names}"
        if warning.kind == "weaker-trap":
            return f"{rule} {warning.detail} on {what}."
        return f"{rule} was taken off {what}: no {self.code(warning.detail)} looks there now."

    def order(self) -> str:
        seen = any(warning.kind == "order" for warning in self.difference.warnings)
        effect = "" if seen else "; no tensor sees another order"
        return f"the rules stand in another order in the file{effect}"

    def changes(self) -> Iterator[tuple[str, RuleChange, list[str]]]:
        found = self.difference
        for change in found.added:
            yield "+", change, [self._given(option) for option in change.options]
        for change in found.removed:
            yield "-", change, [self._given(option) for option in change.options]
        for change in found.changed:
            yield "~", change, [self._changed(option) for option in change.options]
        for change in found.renamed:
            yield "~", change, [f"renamed from {self.code(change.old_id)}"]

    def binds(self, change: RuleChange) -> tuple[str, str]:
        things = self._from_to(f"{len(change.before):,}", f"{len(change.after):,}")
        if change.target != "params":
            return f"{things} {NOUNS[change.target]}s", ""
        return things, self._from_to(short(change.elements_before), short(change.elements_after))

    def unchanged(self) -> str:
        ids = self.difference.unchanged
        more = len(ids) - _MAX_UNCHANGED
        rest = f" and {count(more, 'other')}" if more > 0 else ""
        return ", ".join(map(self.code, ids[:_MAX_UNCHANGED])) + rest

    def names(self, names: Sequence[str]) -> str:
        folded = fold_names(names)
        shown = [
            self.code(text) + f" x{len(members)}" * (len(members) > 1)
            for text, members in list(folded.items())[:_MAX_NAMES]
        ]
        more = len(folded) - _MAX_NAMES
        return ", ".join(shown) + (f" and {count(more, 'other')}" if more > 0 else "")

    def chain(self, ids: Sequence[str]) -> str:
        shown = [self.code(rule) for rule in ids[:_MAX_CHAIN]]
        if (more := len(ids) - _MAX_CHAIN) > 0:
            shown.append(f"{more} more")
        return f" {self.arrow} ".join(shown) or "no rule"

    def chains(self) -> list[tuple[tuple[Ids, Ids], list[str]]]:
        groups: dict[tuple[Ids, Ids], list[str]] = {}
        for change in (*self.difference.params, *self.difference.tensors):
            groups.setdefault((change.before, change.after), []).append(change.name)
        return list(groups.items())

    def _from_to(self, before: str, after: str) -> str:
        return before if before == after else f"{before} {self.arrow} {after}"

    def _changed(self, option: OptionChange) -> str:
        absent = "always" if option.name in {"steps", "optional"} else "not given"
        texts = (_spelled(option.name, value) for value in (option.before, option.after))
        before, after = (self.code(text) if text else absent for text in texts)
        said = option.meaning or "; ".join(self._of_losses(option))
        meaning = f": {said}" if said else ""
        name = self.code(option.name)
        return f"{name}: {before} {self.arrow} {after} ({option.direction}{meaning})"

    def _of_losses(self, option: OptionChange) -> Iterator[str]:
        """Yield what became of the losses that an option names."""
        before, after = option.before, option.after
        if option.name in ("losses", "memory"):
            lists = (after or [], before or []), (before or [], after or [])
            for (names, others), word in zip(lists, ("more", "fewer"), strict=True):
                if found := [self.code(name) for name in names if name not in others]:
                    yield f"{len(found)} {word}: {', '.join(found)}"
        elif option.name == "preference":
            # One that is not given counts as 1.
            was, now = defaultdict(lambda: 1.0, before or {}), defaultdict(lambda: 1.0, after or {})
            for name in dict.fromkeys((*was, *now)):
                if was[name] != now[name]:
                    yield f"{self.code(name)} counts {'more' if now[name] > was[name] else 'less'}"

    def _given(self, option: OptionChange) -> str:
        value = option.after if option.before is None else option.before
        return f"{self.code(option.name)}: {self.code(_spelled(option.name, value))}"


def short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _spelled(name: str, value: Any) -> str:
    """Return a value as a rule file spells it; empty for one that is not given."""
    if value is None:
        return ""
    if name in _QUOTED:
        texts = [value] if isinstance(value, str) else value
        quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
        return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(value)}]" if isinstance(value, list) else written(value)
