import re
from collections.abc import Iterator

from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext

# What YAML 1.1 takes for a number with a fraction or an exponent.
_YAML_1_1 = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9_]+(?:[eE][-+][0-9]+)?"
)
_PARTS = re.compile(r"([-+]?)([0-9]*)(\.?)([0-9]*)(?:[eE]([-+]?)([0-9]+))?")


class ExponentWithoutDot(Check):
    """A number is a text to tools that read YAML 1.1.

    ## What it finds
    Numbers such as `1e3`, `1e-3`, `1.5e10` and `-.5`.

    ## Why it matters
    Rule files are YAML 1.2, where these are numbers. To YAML 1.1 a number with an exponent has a dot
    and a sign in the exponent: other tools, PyYAML among them, read a text. Words and whole numbers that
    readers differ on, such as `no`, `010` and `1_000`, are reported as `yaml-1.1-lookalike`.

    ## What to do
    If other tools read the file, write `1.0e-3`, `1.0e+3`, `-0.5`.
    """

    severity = "note"
    GOOD = """
- id: bounded
  action: clamp
  params: "*"
  at: step
  min: -1.0e-3
  max: 0.001
"""
    BAD = """
- id: bounded
  action: clamp
  params: "*"
  at: step
  min: -1e-3
  max: 1e-3
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for path, text in context.floats(rule):
                parts = None if _YAML_1_1.fullmatch(text) else _PARTS.fullmatch(text)
                if parts is None:
                    continue
                sign, whole, _, rest, plus, power = parts.groups()
                plain = f"{sign}{whole or 0}.{rest or 0}"
                plain += f"e{plus or '+'}{power}" if power else ""
                message = f"`{text[:60]}` is a number here, but a text to YAML 1.1 tools"
                yield Finding(rule, path, message, f"`{plain[:60]}` is a number to both")
