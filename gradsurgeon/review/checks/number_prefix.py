import re
from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.checks._shared import patterns
from gradsurgeon.review.lint_context import LintContext

_NUMBER = re.compile(r"(?<![0-9])([0-9]+)\*")


class NumberPrefix(Check):
    """A star right behind a number takes more digits, too.

    ## What it finds
    Globs such as `layers.1*`. Where the names of a model are known, only those for which the model has
    such a longer number.

    ## Why it matters
    `layers.1*` means layer 1, and 10 to 19, and 100: a pattern that was right for a small model grows
    with the model.

    ## What to do
    Close the number by a dot, as in `layers.1.*`, or name a range: `layers.{10..19}.*`.
    """

    GOOD = """
- id: second-layer
  action: norm-log
  params: ["layers.1.*", "layers.{10..19}.*"]
"""
    BAD = """
- id: second-layer
  action: norm-log
  params: "layers.1*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in patterns(rule):
                number = None if text.startswith("re:") else _NUMBER.search(text)
                if number is None or not _goes_on(number[1], context.hits(rule, text)):
                    continue
                digits = number[1][:20]
                message = f"`{digits}*` means {digits}, {digits}0, {digits}1 and so on"
                hint = f'close the number: "{text.replace(number[0], f"{number[1]}.*", 1)[:80]}"'
                yield Finding(rule, path, message, hint)


def _goes_on(number: str, hits: list[str] | None) -> bool:
    longer = re.compile(f"(?<![0-9]){number}[0-9]")
    return hits is None or any(map(longer.search, hits))
