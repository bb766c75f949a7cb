"""What every check has in common.

One file beside this one is one check: a class named like the file, whose docstring is its page, with
an example that it finds nothing in and one that it finds. The file is found by itself.
"""

from __future__ import annotations

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
    rule: Rule  # that it is shown at
    at: tuple[
        str | int, ...
    ]  # the option, such as ``("steps", "every")``; one that stands in the file
    message: str
    hint: str
    others: tuple[Rule, ...] = ()  # that it is about as well


class Check(ABC):
    """A question to valid rules.

    Attributes:
        severity: ``error`` where training cannot begin with the rules, ``warning`` where they hardly do
            what was meant, ``note`` where they may.
        GOOD: rules in which it finds nothing.
        BAD: rules in which it finds something.
        NAMES: the parameters of the model that both are for; none where they hold for any model.
        WEIGHTS: these come from a file of weights, which tells less.
    """

    severity: ClassVar[Severity] = "warning"
    GOOD: ClassVar[str]
    BAD: ClassVar[str]
    NAMES: ClassVar[tuple[str, ...]] = ()
    WEIGHTS: ClassVar[bool] = False

    @property
    def id(self) -> str:
        """Name in messages and in suppressions, from the name of the class."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def find(self, context: LintContext) -> Iterator[Finding]:
        """Yield what it finds."""
