"""What every check has in common."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gradsurgeon.actions import Rule
from gradsurgeon.errors import Severity
from gradsurgeon.review.lint_context import LintContext


@dataclass(frozen=True, slots=True)
class Finding:
    rule: Rule  # where it is shown
    at: tuple[str | int, ...]  # at which option of the rule in its file: ``("steps", "every")``
    message: str
    hint: str
    others: tuple[Rule, ...] = ()  # which the finding is about as well


class Check(ABC):
    """One question about valid rules. The docstring of a subclass is its page, with the example below."""

    # `error`: training cannot begin. `warning`: the rules hardly do what was meant. `note`: they may.
    severity: ClassVar[Severity] = "warning"
    BAD: ClassVar[str]  # rules in which it finds something ...
    # ... in a model with these parameters, where it needs one.
    NAMES: ClassVar[tuple[str, ...]] = ()

    @property
    def id(self) -> str:
        """The name in messages and suppressions, from the name of the class."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def find(self, context: LintContext) -> Iterator[Finding]: ...
