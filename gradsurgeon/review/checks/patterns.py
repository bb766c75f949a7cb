"""Checks on what the patterns of one rule match."""

import re
from collections.abc import Iterable, Iterator

from gradsurgeon.actions import Rule, TargetKind
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext
from gradsurgeon.review.matched_rules import Flaw

_NUMBER = re.compile(r"(?<![0-9])([0-9]+)\*")
# A word or a choice of words, which cannot match a name with a dot.
_WORDS = re.compile(r"\^?[\w|()-]*[A-Za-z][\w|()-]*\$?")
_WORD = re.compile(r"[\w-]+")
# The parts between commas outside of braces and brackets; a range with a dash instead of two dots.
_PIECE = re.compile(r"(?:\{[^{}]*\}|\[[^\[\]]*\]|[^{}\[\],;])+")
_DASH = re.compile(r"\{\s*([0-9]+)\s*(?:-|\.\.\.|:)\s*([0-9]+)\s*\}")


class NoMatch(Check):
    """A rule matches nothing in the model whose names `--params` gives to lint.

    Training with such a rule ends with an error before its first step. Most often a name is misspelt, or
    the model has changed and the rule has not.

    Correct the pattern: the message has the nearest names. If a rule is meant for some models only, write
    `optional: true`, or `model:` with the class of the model.
    """

    severity = "error"
    NAMES = ("encoder.fc.weight", "encoder.fc.bias")
    BAD = """
- id: norms
  action: norm-log
  params: "encodr.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, flaw in _flaws(context, "no-match"):
            slips = (meant for _, text in _patterns(rule) for _, meant in _other_syntax(text))
            hint = next((f"write {meant}" for meant in slips), flaw.hint)
            yield Finding(rule, flaw.at, flaw.text, hint)


class BrokenExpect(Check):
    """A rule matches another number of parameters than its `expect` says.

    Training with such a rule ends with an error before its first step. The number is there so that a pattern
    cannot change its meaning unnoticed, and in the model whose names `--params` gives to lint, it has.

    `gradsurgeon plan` shows the matches of the rule. If they are wrong, correct the pattern; if they are right,
    correct the number.
    """

    severity = "error"
    NAMES = ("fc1.weight", "fc1.bias", "fc2.weight")
    BAD = """
- id: norms
  action: norm-log
  params: "fc*"
  expect: {params: 2}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, flaw in _flaws(context, "expect"):
            yield Finding(rule, flaw.at, flaw.text, flaw.hint)


class CannotAct(Check):
    """A rule cannot act on its matches, or the names cannot decide what it matches.

    Training with such a rule ends with an error before its first step. With the names of a model, from
    `--params`, the check finds rules on parameters that have no shape yet, that are complex or sparse and do
    not allow the action, or that are sharded so that the rule cannot reach them. It also finds conditions that
    the file of names cannot decide.

    The message says what the rule can do instead. For undecided conditions, give lint the names as
    `gradsurgeon params` writes them.
    """

    severity = "error"
    NAMES = ("fc.weight", "fc.bias")
    BAD = """
- id: norms
  action: norm-log
  params: "fc.*"
  where: {module_type: "Linear"}  # a file of weights has no classes
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, flaw in _flaws(context, "cannot-act"):
            yield Finding(rule, flaw.at, flaw.text, flaw.hint)


class NumberPrefix(Check):
    """A star right behind a number also matches more digits.

    `layers.1*` means layers 1, 10 to 19, and 100: a pattern that was right for a small model grows with the
    model. With the names of a model, the check reports it only if the model has such a longer number.

    End the number with a dot, as in `layers.1.*`, or write a range: `layers.{10..19}.*`.
    """

    BAD = """
- id: second-layer
  action: norm-log
  params: "layers.1*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in _patterns(rule):
                number = None if text.startswith("re:") else _NUMBER.search(text)
                if number is None or not _goes_on(number[1], context.hits(rule, text)):
                    continue
                digits = number[1][:20]
                message = f"`{digits}*` means {digits}, {digits}0, {digits}1 and so on"
                hint = f'end the number with a dot: "{text.replace(number[0], f"{number[1]}.*", 1)[:80]}"'
                yield Finding(rule, path, message, hint)


class PartialRegex(Check):
    """A regular expression must match the whole name, but looks like a part of a name.

    `re:attn` matches a parameter named `attn`, and neither `attn.weight` nor `h.0.attn.bias`. In an `exclude` or
    a list of patterns the mistake is easily missed. The check finds expressions of words only, and expressions
    with an anchor at one end and no wildcard at the other, as in `re:^layers` or `re:bias$`. With the names of a
    model, it reports only expressions without a match.

    Write `re:.*attn.*`, or the glob `*attn*`.
    """

    BAD = """
- id: attention
  action: norm-log
  params: ["re:attn", "re:^h.0"]
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in _patterns(rule):
                body = text.removeprefix("re:")
                if body == text or not _partial(body, rule.target) or context.hits(rule, text):
                    continue
                meant = body.removeprefix("^").removesuffix("$")
                lead = "" if body.startswith("^") else ".*"
                trail = "" if body.endswith("$") else ".*"
                message = f"`{text[:60]}` must match the whole name, not a part of it"
                yield Finding(rule, path, message, f'did you mean "re:{lead}{meant[:60]}{trail}"?')


class OtherSyntax(Check):
    """A pattern uses the list or range syntax of another language.

    In `"tok.weight, pos.weight"` the comma is part of one name, and `{0-3}` is the text `0-3`. Such a pattern
    matches nothing, or too little. With the names of a model, the check reports only patterns without a match.

    Write a YAML list, `["tok.weight", "pos.weight"]`, a choice, `{tok,pos}.weight`, or a range with two dots, `{0..3}`.
    """

    BAD = """
- id: embeddings
  action: norm-log
  params: "tok.weight, pos.weight"
- id: first-blocks
  action: norm-log
  params: "blocks.{0-3}.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in _patterns(rule):
                if not context.hits(rule, text):
                    for message, meant in _other_syntax(text):
                        yield Finding(rule, path, message, f"write {meant}")


class UselessExclude(Check):
    """An `exclude` excludes nothing.

    The rule acts on tensors that it was meant to spare: the exclude is misspelt, or lacks a star. `exclude: "bias"`
    is the name `bias`, not all biases. Without the names of a model, the check finds certain cases only: the
    exclude is a name without wildcards, or all patterns are.

    Correct or remove it. Any name of a tied parameter excludes the parameter; without names, lint cannot see
    that, and you may have to suppress the warning.
    """

    BAD = """
- id: clipped
  action: clip-norm
  params: "layers.*"
  exclude: "bias"
  max_norm: 1.0
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for index, text in enumerate(rule.exclude):
                if why := _takes_nothing(context, rule, text):
                    hint = "correct or remove it"
                    if "*" not in text and not text.startswith("re:") and "re:" not in why:
                        hint = f'did you mean "*{text[:60]}" or "{text[:60]}*"?'
                    yield Finding(rule, ("exclude", index), why, hint)


def _flaws(context: LintContext, kind: str) -> Iterator[tuple[Rule, Flaw]]:
    if context.matched is None:
        return
    for rule in context.rules:
        yield from ((rule, flaw) for flaw in context.matched.flaws(rule.id) if flaw.kind == kind)


def _patterns(rule: Rule) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for key in (rule.target, "exclude"):
        for index, text in enumerate(getattr(rule, key)):
            yield (key, index), text


def _other_syntax(text: str) -> Iterator[tuple[str, str]]:
    """Yield why a glob looks like a list or range of another language, and what to write instead."""
    if text.startswith("re:"):
        return
    if dash := _DASH.search(text):
        meant = text.replace(dash[0], f"{{{dash[1]}..{dash[2]}}}", 1)
        yield f"`{dash[0][:40]}` is text, not a range: a range has two dots", f'"{meant[:80]}"'
    pieces = [piece.strip() for piece in _PIECE.findall(text)]
    if len(pieces) > 1:
        listed = ", ".join(f'"{piece[:40]}"' for piece in pieces[:3])
        more = ", ..." * (len(pieces) > 3)  # noqa: PLR2004 # three are enough to understand
        yield (
            "a comma outside of braces is part of the name and separates no patterns",
            f"[{listed}{more}]",
        )


def _goes_on(number: str, hits: Iterable[str] | None) -> bool:
    longer = re.compile(f"(?<![0-9]){number}[0-9]")
    return hits is None or any(map(longer.search, hits))


def _partial(body: str, target: TargetKind) -> bool:
    # A module or tag may have a name of one word; there only a plain word is odd as an expression.
    words = _WORDS if target == "params" else _WORD
    if words.fullmatch(body):
        return True
    first = body.startswith("^")
    last = body.endswith("$") and not body.endswith(r"\$")
    if first == last or "|" in body:
        return False
    # The other end is open if it has a repeat or a group.
    return (
        not body.endswith(("*", "+", "}", ")")) if first else not body.startswith((".*", ".+", "("))
    )


def _takes_nothing(context: LintContext, rule: Rule, text: str) -> str:
    """Return why an exclude excludes nothing; empty if it excludes something, or may."""
    hits = context.hits(rule, text)
    if hits is None:
        name = f"`{text[:60]}` cannot match a name that the patterns of the rule match"
        return name if context.never_matches(rule, text) else ""
    # Compared by canonical name, because any alias excludes a parameter.
    wanted = {name for p in rule.patterns for name in (context.hits(rule, p.text) or {}).values()}
    taken = wanted.intersection(hits.values())
    return "" if taken else f"`{text[:60]}` excludes none of the matches"
