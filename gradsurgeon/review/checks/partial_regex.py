import re
from collections.abc import Iterator

from gradsurgeon.actions import TargetKind
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import patterns
from gradsurgeon.review.lint_context import LintContext

# Matches a word or a choice of words: no name with a dot in it.
_WORDS = re.compile(r"\^?[\w|()-]*[A-Za-z][\w|()-]*\$?")
_WORD = re.compile(r"[\w-]+")


class PartialRegex(Check):
    """A regular expression matches the whole name, but looks like a part of it.

    ## What it finds
    Expressions of words only, as in `re:attn` for parameters, whose names have dots; and those with
    an anchor at one end and nothing that is open at the other, as in `re:^layers` or `re:bias$`.

    ## Why it matters
    `re:attn` matches a parameter that is called `attn`, and neither `attn.weight` nor `h.0.attn.bias`.
    As an `exclude` or as one of several patterns it would miss almost without a sound.

    ## What to do
    Write `re:.*attn.*`, or the glob `*attn*`. Where the names of a model are known, expressions that
    match one are not reported.
    """

    GOOD = r"""
- id: attention
  action: norm-log
  params: ['re:.*\.attn\..*', 're:h\.\d+\.attn\.bias']
"""
    BAD = """
- id: attention
  action: norm-log
  params: ["re:attn", "re:^h.0"]
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in patterns(rule):
                body = text.removeprefix("re:")
                if body == text or not _partial(body, rule.target) or context.hits(rule, text):
                    continue
                meant = body.removeprefix("^").removesuffix("$")
                lead = "" if body.startswith("^") else ".*"
                trail = "" if body.endswith("$") else ".*"
                message = f"`{text[:60]}` must match the whole name, not a part of it"
                yield Finding(rule, path, message, f'did you mean "re:{lead}{meant[:60]}{trail}"?')


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
