"""A difference in words, and as text for the terminal."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradsurgeon.actions import written
from gradsurgeon.errors import printable
from gradsurgeon.planning.table import NOUNS, count, fold_names
from gradsurgeon.review.difference import Difference, Ids, OptionChange, RuleChange

_MAX_NAMES = 6
_MAX_UNCHANGED = 10
_MAX_CHAIN = 40  # rules of one chain
_CHAINS = 20
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
_WARNINGS = {
    "lost-protection": "{number} lost all protection: no rule edits, freezes or traps the gradient now: {names}.",
    "lost-trap": "{rule} no longer acts on {number}: {names}: no {quoted} is there now.",
    "no-match": f"{{rule}} matches nothing in this model: {_ENDS}. {{quoted}}",
    "expect": f"{{rule}} {{detail}}: {_ENDS}.",
    "cannot-act": f"{{rule}} cannot act on this model: {_ENDS}. {{quoted}}",
    "order": "the order of effects changed for {number}: {names}. For the first: {before} before, {after} now.",
}


@dataclass(frozen=True, slots=True)
class Phrases:
    """The phrases for one difference, the same in a terminal and in a pull request."""

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
            "other order" * found.order_changed,
        ]
        rules = ", ".join(filter(None, parts)) or "other chains"
        before, after = (f"{number:,}" for number in found.covered)
        covered = f"{self._from_to(before, after)} of {len(found.manifest.params):,}"
        lost = f"; {len(found.lost):,} lost all protection" * bool(found.lost)
        return f"{rules}; {covered} parameters under rules{lost}"

    def warnings(self) -> Iterator[str]:
        found = self.difference
        params = {param.name for param in found.manifest.params}
        for warning in found.warnings:
            names = warning.names
            before, after = "", ""
            if warning.kind == "order":
                chains = (one for one in (*found.params, *found.tensors) if one.name == names[0])
                before, after = map(self.chain, next(chains)[1:])
            yield _WARNINGS[warning.kind].format(
                rule=self.code(next(iter(warning.rules), "")),
                number=count(len(names), "parameter" if params.issuperset(names) else "tensor"),
                names=self.names(names),
                detail=warning.detail,
                quoted=self.code(warning.detail),
                before=before,
                after=after,
            )

    def order(self) -> str:
        seen = any(warning.kind == "order" for warning in self.difference.warnings)
        effect = "" if seen else "; no tensor sees another order"
        return f"the rules are in another order in the file{effect}"

    def changes(self) -> Iterator[tuple[str, RuleChange, list[str]]]:
        found = self.difference
        for sign, changes in (("+", found.added), ("-", found.removed), ("~", found.changed)):
            details = self._changed if sign == "~" else self._given
            for change in changes:
                yield sign, change, [details(option) for option in change.options]

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

    def chain(self, ids: Sequence[str]) -> str:
        more = len(ids) - _MAX_CHAIN
        shown = [*map(self.code, ids[:_MAX_CHAIN]), *([f"{more} more"] if more > 0 else [])]
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
        return f"{self.code(option.name)}: {before} {self.arrow} {after}"

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


def render(difference: Difference) -> str:
    """Return a difference for the terminal."""
    return "\n".join(_lines(difference))


def _lines(difference: Difference) -> Iterator[str]:
    phrases = Phrases(difference, _shown, "->")
    manifest = difference.manifest
    size = f"{count(len(manifest.params), 'parameter')}, {short(manifest.elements)} elements"
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {_shown(manifest.origin)}: {size}"
    yield phrases.summary()
    if difference.warnings:
        yield ""
        yield from (f"warning: {warning}" for warning in phrases.warnings())
    if difference.order_changed:
        yield f"note: {phrases.order()}"
    yield from (f"note: {_shown(note)}" for note in manifest.notes)
    if not difference.in_effect:
        return
    yield ""
    for sign, change, details in phrases.changes():
        things, elements = phrases.binds(change)
        plural = "s" * (things != "1")
        noun = f" parameter{plural} ({elements} elements)" if change.target == "params" else ""
        yield f"{sign} {change.id}  {change.action} on {things}{noun}"
        yield from (f"      {detail}" for detail in details)
    if difference.unchanged:
        yield f"= {phrases.unchanged()}"
    if groups := phrases.chains():
        yield ""
        number = sum(len(names) for _, names in groups)
        yield f"tensors under other rules than before, in order of effect: {number:,}"
        for (before, after), names in groups[:_CHAINS]:
            yield f"  {phrases.names(names)}"
            yield f"      before: {phrases.chain(before)}"
            yield f"      now:    {phrases.chain(after)}"
        if (more := len(groups) - _CHAINS) > 0:
            yield f"  and {count(more, 'other pair')} of chains: `--format json` has all"


def _shown(text: str) -> str:
    """Return a user's text without commands, for a terminal and for the log of a job.

    GitHub reads a line of a log that begins with `::` as a command, and `##[` anywhere in a line.
    """
    shown = printable(text).replace("##[", "#\\x23[")
    # GitHub ignores blanks before the command.
    return shown.replace("::", "\\x3a:", 1) if shown.lstrip().startswith("::") else shown
