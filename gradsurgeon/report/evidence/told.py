"""The result: what one rule would have done in a recorded run."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
ALL = "all together"


@dataclass(frozen=True)
class Thresholds:
    """What a rule compared with its bound in a run.

    Attributes:
        group: the tensors, as like layers have them; `ALL` if they share one norm.
        values: the quantiles at `SHARES`, the last the largest; of finite values.
        acts: for each, in how many updates a rule with that bound would have acted.
        steps: in how many updates it compared something.
    """

    group: str
    values: tuple[float, ...]
    acts: tuple[int, ...]
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        rows = []
        for share, value, acts in zip(SHARES, self.values, self.acts, strict=True):
            rows.append({"quantile": share, "value": value, "acts": acts})
        return {"group": self.group, "steps": self.steps, "thresholds": rows}


class Strongest(NamedTuple):
    """Where a rule would have acted most: ``factor`` is norm over bound, ``None`` if the rule has no bound."""

    name: str
    step: int
    factor: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, which has no infinite numbers."""
        form = self._asdict()
        if self.factor == math.inf:
            form["factor"] = None
        return form


@dataclass
class Told:
    """What one rule would have done: filled table by table.

    Attributes:
        run: the run.
        steps: how many updates have the records that the rule needs.
        acts: the updates in which it would have changed a tensor, or tripped.
        largest: where it would have acted most, ``None`` if nowhere.
        strength: how strongly there: norm over bound, or the norm.
        by_name: how often it would have acted on each tensor: in updates, at `backward` in passes.
        missing: why the records do not tell; empty if they do.
        bites: whether it holds gradients to a bound.
        is_rounded: whether the counts come from some steps that stand for others.
        is_of_one_rank: whether the records are of rank 0 alone, and other ranks had numbers of their own.
        thresholds: the quantiles of what it compares with its bound, if they were asked for.
    """

    run: str
    steps: int = 0
    acts: int = 0
    largest: Strongest | None = None
    strength: float = -math.inf
    by_name: Counter[str] = field(default_factory=Counter)
    missing: str = ""
    bites: bool = False
    is_rounded: bool = False
    is_of_one_rank: bool = False
    thresholds: Sequence[Thresholds] = ()

    @property
    def share(self) -> float:
        """The share of the updates in which the rule would have acted."""
        if not self.steps:
            return 0.0
        return self.acts / self.steps

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form; numbers are ``None`` if the records do not tell."""
        form: dict[str, Any] = {
            "run": self.run,
            "steps": self.steps,
            "acts": self.acts,
            "share": self.share,
            "largest": self.largest and self.largest.to_dict(),
            "told": not self.missing,
            "missing": self.missing or None,
        }
        if self.missing:
            form |= dict.fromkeys(("steps", "acts", "share", "largest"))
        if self.thresholds:
            form["thresholds"] = [each.to_dict() for each in self.thresholds]
        return form
