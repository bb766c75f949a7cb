"""Checks on what the patterns of one rule match."""

import re
from collections.abc import Iterable, Iterator

from gradsurgeon.actions import Rule, TargetKind
from gradsurgeon.planning import examples
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext

_NUMBER = re.compile(r"(?<![0-9])([0-9]+)\*")
# Matches a word or a choice of words: no name with a dot in it.
_WORDS = re.compile(r"\^?[\w|()-]*[A-Za-z][\w|()-]*\$?")
_WORD = re.compile(r"[\w-]+")
# What commas outside of braces and brackets divide, and a dash where a range has two dots.
_PIECE = re.compile(r"(?:\{[^{}]*\}|\[[^\[\]]*\]|[^{}\[\],;])+")
_DASH = re.compile(r"\{\s*([0-9]+)\s*(?:-|\.\.\.|:)\s*([0-9]+)\s*\}")


class NoMatch(Check):
    """A rule matches nothing in the model whose names lint is given with `--params`.

    Training with such a rule ends with an error before its first step. Most often a name is misspelt, or
    the model has changed and the rule has not.

    Correct the pattern: the nearest names are given. Where a rule is meant for some models only, write
    `optional: true`, or `model:` with the class that it is for.
    """

    severity = "error"
    NAMES = ("encoder.fc.weight", "encoder.fc.bias")
    BAD = """
- id: norms
  action: norm-log
  params: "encodr.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is None:
            return
        for rule in context.rules:
            if context.matched.has_no_match(rule.id):
                hint = "correct the pattern, or write `optional: true` if it may match nothing"
                slips = (meant for _, text in _patterns(rule) for _, meant in _other_syntax(text))
                hint = next((f"write {meant}" for meant in slips), hint)
                yield Finding(rule, (rule.target,), context.matched.no_match(rule.id), hint)


class BrokenExpect(Check):
    """A rule matches another number of parameters than its `expect` says.

    Training with such a rule ends with an error before its first step. The number was written down so that
    a pattern cannot come to mean something else unnoticed, and in the model whose names lint is given
    with `--params` it now does.

    Look at what the rule matches with `gradsurgeon plan`. Correct the pattern if that is wrong, the number
    if it is right.
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
        if context.matched is None:
            return
        for rule in context.rules:
            if rule.expect is not None and context.matched.breaks_expect(rule.id):
                things = context.matched.matches[rule.id].things
                matched = f"matched {len(things)}{examples(things)}"
                message = f"expected {rule.expect.params} parameters, {matched}"
                hint = "correct the pattern or the `expect`"
                yield Finding(rule, ("expect", "params"), message, hint)


class CannotAct(Check):
    """A rule cannot act on what it matches, or nobody can tell what it matches.

    Training with such a rule ends with an error before its first step. With the names of a model, which
    lint is given with `--params`, these are found: rules on parameters that have no shape yet, that are
    complex or sparse and do not bear the action, or that several ranks divide so that the rule cannot get
    at them; and conditions that the file of names does not decide.

    The message says what the rule can do instead. For conditions that cannot be decided, give lint the
    names as `gradsurgeon params` writes them.
    """

    severity = "error"
    NAMES = ("fc.weight", "fc.bias")
    BAD = """
- id: norms
  action: norm-log
  params: "fc.*"
  where: {module_type: "Linear"}  # a file of weights does not tell the classes
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is None:
            return
        for rule in context.rules:
            for text in context.matched.obstacles(rule.id):
                yield Finding(rule, ("id",), text, "")


class NumberPrefix(Check):
    """A star right behind a number takes more digits, too.

    `layers.1*` means layer 1, and 10 to 19, and 100: a pattern that was right for a small model grows
    with the model. Where the names of a model are known, it is found if the model has such a longer number.

    Close the number by a dot, as in `layers.1.*`, or name a range: `layers.{10..19}.*`.
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
                hint = f'close the number: "{text.replace(number[0], f"{number[1]}.*", 1)[:80]}"'
                yield Finding(rule, path, message, hint)


class PartialRegex(Check):
    """A regular expression matches the whole name, but looks like a part of it.

    `re:attn` matches a parameter that is called `attn`, and neither `attn.weight` nor `h.0.attn.bias`. As
    an `exclude` or as one of several patterns it would miss almost without a sound. Found are expressions
    of words only, and those with an anchor at one end and nothing that is open at the other, as in
    `re:^layers` or `re:bias$`; where the names of a model are known, only if they match none.

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
    """A pattern is written as lists or ranges are in another language.

    In `"tok.weight, pos.weight"` the comma is a part of one name, and `{0-3}` is the text `0-3`. Such a pattern matches
    nothing, or less than was meant. Where the names of a model are known, it is found if the model has no such name.

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
    """An `exclude` takes nothing out.

    Somebody meant to keep the rule off something, and it acts there: the exclude is misspelt, or lacks
    a star. `exclude: "bias"` is the name `bias`, not all biases. Where the names of a model are not known,
    only what is certain is found: the exclude is a name without wildcards, or all patterns are.

    Correct or remove it. Of a tied parameter, excluding any of its names excludes it; where the names
    are not known, lint cannot see that, and the warning is to be suppressed.
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


def _patterns(rule: Rule) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for key in (rule.target, "exclude"):
        for index, text in enumerate(getattr(rule, key)):
            yield (key, index), text


def _other_syntax(text: str) -> Iterator[tuple[str, str]]:
    """Yield why a glob looks like a list or a range of another language, and what is to be written instead."""
    if text.startswith("re:"):
        return
    if dash := _DASH.search(text):
        meant = text.replace(dash[0], f"{{{dash[1]}..{dash[2]}}}", 1)
        yield f"`{dash[0][:40]}` is text, not a range: a range has two dots", f'"{meant[:80]}"'
    pieces = [piece.strip() for piece in _PIECE.findall(text)]
    if len(pieces) > 1:
        listed = ", ".join(f'"{piece[:40]}"' for piece in pieces[:3])
        more = ", ..." * (len(pieces) > 3)  # noqa: PLR2004 # enough to see what is meant
        yield (
            "a comma outside of braces is a part of the name: it separates no patterns",
            f"[{listed}{more}]",
        )


def _goes_on(number: str, hits: Iterable[str] | None) -> bool:
    longer = re.compile(f"(?<![0-9]){number}[0-9]")
    return hits is None or any(map(longer.search, hits))


def _partial(body: str, target: TargetKind) -> bool:
    # Modules and tags can be called by one word; then only a mere word is odd as an expression.
    words = _WORDS if target == "params" else _WORD
    if words.fullmatch(body):
        return True
    first = body.startswith("^")
    last = body.endswith("$") and not body.endswith(r"\$")
    if first == last or "|" in body:
        return False
    # Open at the other end: a repeat, a dot.
    return (
        not body.endswith(("*", "+", "}", ")")) if first else not body.startswith((".*", ".+", "("))
    )


def _takes_nothing(context: LintContext, rule: Rule, text: str) -> str:
    """Return why an exclude leaves nothing out; empty if it does, or may."""
    hits = context.hits(rule, text)
    if hits is None:
        name = f"`{text[:60]}` matches no name that the patterns of the rule can match"
        return name if context.never_matches(rule, text) else ""
    # By any alias: what is excluded under one name is excluded.
    wanted = {name for p in rule.patterns for name in (context.hits(rule, p.text) or {}).values()}
    taken = wanted.intersection(hits.values())
    return "" if taken else f"`{text[:60]}` takes nothing out of the match"
