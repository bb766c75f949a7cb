"""A difference in words, the same in a terminal and in a pull request."""

import json
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
_ENDS = "training with these rules ends with an error before its first step"

Ids = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phrases:
    """The phrases for one difference."""

    difference: Difference
    code: Callable[[str], str]  # escapes a user's text for the form of output
    arrow: str  # between before and after

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
        return map(self._warning, self.difference.warnings)

    def _warning(self, warning: DiffWarning) -> str:
        rules = [self.code(rule) for rule in warning.rules]
        things, detail = self._counted(warning.names), warning.detail
        match warning.kind:
            case "lost-protection":
                lost = f"{count(len(warning.names), 'parameter')} lost all protection"
                names = self.names(warning.names)
                text = f"{lost}: no rule edits, freezes or traps the gradient now: {names}."
            case "lost-trap":
                trap = self.code(detail)
                text = f"{rules[0]} no longer acts on {things}: no {trap} is there now."
            case "weaker-trap":
                text = f"{rules[0]} {detail} on {things}."
            case "no-match":
                text = f"{rules[0]} matches nothing in this model: {_ENDS}. {self.code(detail)}"
            case "cannot-act":
                text = f"{rules[0]} cannot act on this model: {_ENDS}. {self.code(detail)}"
            case "expect":
                text = f"{rules[0]} {detail}: {_ENDS}."
            case "order":
                chains = (*self.difference.params, *self.difference.tensors)
                example = next(chain for chain in chains if chain.name == warning.names[0])
                before, now = self.chain(example.before), self.chain(example.after)
                text = f"the order of effects changed for {things}. For the first: {before} before, {now} now."
        return text

    def order(self) -> str:
        seen = any(warning.kind == "order" for warning in self.difference.warnings)
        effect = "" if seen else "; no tensor sees another order"
        return f"the rules are in another order in the file{effect}"

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
        before, after = change.before, change.after
        things = self._from_to(f"{len(before.names):,}", f"{len(after.names):,}")
        if change.target != "params":
            return f"{things} {NOUNS[change.target]}s", ""
        return things, self._from_to(short(before.elements), short(after.elements))

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

    def _counted(self, names: Sequence[str]) -> str:
        params = {param.name for param in self.difference.manifest.params}
        noun = "parameter" if params.issuperset(names) else "tensor"
        return f"{count(len(names), noun)}: {self.names(names)}"

    def chain(self, ids: Sequence[str]) -> str:
        return self._chained([self.code(rule) for rule in ids]) or "no rule"

    def _chained(self, rules: Sequence[str]) -> str:
        more = len(rules) - _MAX_CHAIN
        shown = [*rules[:_MAX_CHAIN], *([f"{more} more"] if more > 0 else [])]
        return f" {self.arrow} ".join(shown)

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
        meaning = f": {option.meaning}" if option.meaning else ""
        name = self.code(option.name)
        return f"{name}: {before} {self.arrow} {after} ({option.direction}{meaning})"

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
