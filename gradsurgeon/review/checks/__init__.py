"""The checks of `gradsurgeon lint` on valid rules: every subclass of `Check` in this folder."""

from gradsurgeon.review.checks import pairs, single  # noqa: F401 # importing them defines the checks
from gradsurgeon.review.checks._base import Check, Finding

__all__ = ["CHECKS", "Check", "Finding"]

CHECKS: dict[str, Check] = {
    check.id: check
    for check in sorted((kind() for kind in Check.__subclasses__()), key=lambda check: check.id)
}
