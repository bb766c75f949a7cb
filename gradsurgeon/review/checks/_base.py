"""The base class of checks."""

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
    rule: Rule  # the rule at which it is shown
    at: tuple[str | int, ...]  # the option of the rule in its file, such as ``("steps", "every")``
    message: str
    hint: str
    others: tuple[Rule, ...] = ()  # further rules that the finding is about


class Check(ABC):
    """One question about valid rules. The docstring of a subclass is its page, with the example below."""

    # `error`: training cannot begin. `warning`: probably a mistake. `note`: a fact worth knowing.
    severity: ClassVar[Severity] = "warning"
    BAD: ClassVar[str]  # rules in which the check finds something
    # The parameters of the model in which it finds it, if it needs names.
    NAMES: ClassVar[tuple[str, ...]] = ()

    @property
    def id(self) -> str:
        """The name in messages and suppressions, from the name of the class."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def find(self, context: LintContext) -> Iterator[Finding]: ...
