"""A run directory for a person: records and events, a few lines about it, and pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gradsurgeon.common import _html
from gradsurgeon.errors import printable
from gradsurgeon.records.store import run as stored
from gradsurgeon.report import pictures
from gradsurgeon.report.sources import unread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run(stored.StoredRun):
    __doc__ = stored.StoredRun.__doc__

    def __repr__(self) -> str:
        lines = [f"run {printable(str(self.path))}"]
        lines += unread(self.recorded()).head
        rules = ", ".join(printable(rule["id"]) for rule in self.rules)
        lines.append(f"rules: {rules}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return _html.pre(repr(self))

    def plot(
        self,
        kind: Literal["norms"] = "norms",
        *,
        name: str | Sequence[str] | None = None,
        rule: str | None = None,
    ) -> Figure:
        """Draw norms of the run, as `Session.plot` does. A run directory holds no tensors to draw.

        Args:
            kind: the picture.
            name: a name, a pattern as in a rule file, or several of them.
            rule: the id of the rule; by default the norms of each tensor that the report shows.

        Returns:
            A figure, which a notebook shows; ``figure.savefig("norms.png")`` writes it to a file.

        Raises:
            ValueError: there is no such picture.
            KeyError: a name or pattern matches nothing that was recorded.
            RecordError: no rule has recorded these numbers.
            GradSurgeonError: matplotlib is missing.
        """
        pictures.check(kind, ["norms"])
        figure: Figure = pictures.drawing().norms(self, name=name, rule=rule)
        return figure


def open_run(path: str | os.PathLike[str]) -> Run:
    return stored.opened(path, Run)
