"""A difference in words: as text for the terminal, and as the same text in a comment on a pull request."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from gradsurgeon.actions import written
from gradsurgeon.errors import printable
from gradsurgeon.planning.table import NOUNS, abridged, count
from gradsurgeon.review.difference import Difference, DiffWarning, Ids, OptionChange, RuleChange

LIMIT = 60_000  # characters; GitHub refuses a comment of more than 65,536
_MAX_UNCHANGED = 10
_MAX_CHAIN = 40  # rules of one chain
_CHAINS = 20
_ENDS = "training with these rules ends with an error before its first step"
_WARNINGS = {
    "lost-protection": "{number} lost all protection: no rule edits, freezes or traps the gradient now: {names}.",
    "lost-trap": "{rule} no longer acts on {number}: {names}: no {detail} is there now.",
    "weaker-trap": "{rule} no longer stops or skips: {fault} reaches the weights {of} {number}: {names}.",
    "unfrozen": "{rule} no longer freezes {number}, which train again: {names}.",
    "no-match": f"{{rule}} matches nothing in this model: {_ENDS}. {{detail}}",
    "expect": f"{{rule}} {{detail}}: {_ENDS}.",
    "cannot-act": f"{{rule}} cannot act on this model: {_ENDS}. {{detail}}",
    "order": "the order of effects changed for {number}: {names}. For the first: {before} before, {after} now.",
}
_CUT = (
    "Cut here, because GitHub limits the length of a comment: {} lines are left out. "
    "`gradsurgeon diff` in a terminal shows every rule, `--format json` has all."
)


def render(difference: Difference) -> str:
    """Return a difference for the terminal."""
    return "\n".join(_lines(difference))


def markdown(difference: Difference, *, limit: int = LIMIT) -> str:
    """Return a difference as Markdown of at most ``limit`` characters, ending with a line feed.

    A fence that no text of a user can close holds all such text, so neither markup nor @mentions have a meaning.
    """
    text = render(difference)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    head = f"**Effect of the change: {_summary(difference)}.**\n\n{fence}diff\n"
    # A line that begins with `!` is coloured, too.
    lines = [
        re.sub("^(?:~|(?=warning:))", "! ", line).replace("!  ", "! ") for line in text.split("\n")
    ]
    whole = "".join(f"{line}\n" for line in lines)
    if len(head) + len(whole) + len(fence) < limit:
        return f"{head}{whole}{fence}\n"
    room = limit - len(head) - len(fence) - len(_CUT) - 8
    kept = sum(size <= room for size in accumulate(len(line) + 1 for line in lines))
    shown = "".join(f"{line}\n" for line in lines[:kept])
    return f"{head}{shown}{fence}\n\n{_CUT.format(len(lines) - kept)}\n"


def _lines(difference: Difference) -> Iterator[str]:
    manifest = difference.manifest
    size = f"{count(len(manifest.params), 'parameter')}, {_short(manifest.elements)} elements"
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {_shown(manifest.origin)}: {size}"
    yield _summary(difference)
    if difference.warnings:
        yield ""
        yield from (f"warning: {_warning(difference, one)}" for one in difference.warnings)
    if difference.order_changed:
        seen = any(warning.kind == "order" for warning in difference.warnings)
        effect = "" if seen else "; no tensor sees another order"
        yield f"note: the rules are in another order in the file{effect}"
    yield from (f"note: {_shown(note)}" for note in manifest.notes)
    if difference.in_effect:
        yield ""
        yield from _rules(difference)
        yield from _chains(difference)


def _summary(found: Difference) -> str:
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
    covered = f"{_from_to(before, after)} of {len(found.manifest.params):,}"
    lost = f"; {len(found.lost):,} lost all protection" * bool(found.lost)
    return f"{rules}; {covered} parameters under rules{lost}"


def _warning(found: Difference, warning: DiffWarning) -> str:
    names = warning.names
    before, after = "", ""
    if warning.kind == "order":
        chains = (one for one in (*found.params, *found.tensors) if one.name == names[0])
        before, after = map(_chain, next(chains)[1:])
    params = {param.name for param in found.manifest.params}.issuperset(names)
    return _WARNINGS[warning.kind].format(
        rule=_shown(next(iter(warning.rules), "")),
        number=count(len(names), "parameter" if params else "tensor"),
        of="of" if params else "through",
        fault="a NaN" if warning.detail == "nan-trap" else f"what {_shown(warning.detail)} finds",
        names=_names(names),
        detail=_shown(warning.detail),
        before=before,
        after=after,
    )


def _rules(found: Difference) -> Iterator[str]:
    for sign, changes in (("+", found.added), ("-", found.removed), ("~", found.changed)):
        for change in changes:
            yield f"{sign} {change.id}  {change.action} on {_binds(change)}"
            yield from (f"      {_option(option, sign)}" for option in change.options)
    if ids := found.unchanged:
        more = len(ids) - _MAX_UNCHANGED
        rest = f" and {count(more, 'other')}" if more > 0 else ""
        yield f"= {', '.join(ids[:_MAX_UNCHANGED])}{rest}"


def _binds(change: RuleChange) -> str:
    before, after = change.before, change.after
    things = _from_to(f"{len(before.names):,}", f"{len(after.names):,}")
    into, out = (set(a.names).difference(b.names) for a, b in ((after, before), (before, after)))
    more = [f"+{len(into):,} -{len(out):,}"] * bool(into and out)
    if more and len(into) == len(out):
        things = f"{things} -> {things}"
    noun = NOUNS[change.target] + "s" * (things != "1")
    if change.target == "params":
        more.append(f"{_from_to(_short(before.elements), _short(after.elements))} elements")
    return f"{things} {noun}" + f" ({', '.join(more)})" * bool(more)


def _option(option: OptionChange, sign: str) -> str:
    absent = "always" if option.name in {"steps", "optional"} else "not given"
    texts = [
        # A list of one pattern is a pattern.
        _shown(written(value[0] if isinstance(value, list) and len(value) == 1 else value))
        if value is not None
        else absent
        for value in (option.before, option.after)
    ]
    shown = {"+": texts[1], "-": texts[0]}.get(sign) or " -> ".join(texts)
    return f"{option.name}: {shown}"


def _chains(found: Difference) -> Iterator[str]:
    groups: dict[tuple[Ids, Ids], list[str]] = {}
    changes = (*found.params, *found.tensors)
    for change in changes:
        groups.setdefault((change.before, change.after), []).append(change.name)
    if not groups:
        return
    yield ""
    yield f"tensors under other rules than before, in order of effect: {len(changes):,}"
    for (before, after), names in list(groups.items())[:_CHAINS]:
        yield f"  {_names(names)}"
        yield f"      before: {_chain(before)}"
        yield f"      now:    {_chain(after)}"
    if (more := len(groups) - _CHAINS) > 0:
        yield f"  and {count(more, 'other pair')} of chains: `--format json` has all"


def _names(names: Sequence[str]) -> str:
    return _shown(abridged(names, {}))


def _chain(ids: Sequence[str]) -> str:
    more = len(ids) - _MAX_CHAIN
    return " -> ".join([*ids[:_MAX_CHAIN], *[f"{more} more"] * (more > 0)]) or "no rule"


def _from_to(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _shown(text: str) -> str:
    """Return a user's text without commands, for a terminal and for the log of a job.

    GitHub reads a line of a log that begins with `::` as a command, and `##[` anywhere in a line.
    """
    shown = printable(text).replace("##[", "#\\x23[")
    # GitHub ignores blanks before the command.
    return shown.replace("::", "\\x3a:", 1) if shown.lstrip().startswith("::") else shown
