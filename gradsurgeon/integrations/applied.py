"""Rules on the model of a trainer during its training, and the numbers for its log."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon import api
from gradsurgeon.language import planning
from gradsurgeon.records.delivery import Curves
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.runtime.session import attachment_of
from gradsurgeon.sinks.sink import patterns_of

if TYPE_CHECKING:
    from torch import nn

    from gradsurgeon.common.events import Event
    from gradsurgeon.runtime.session import Session

_PREFIX = "gradsurgeon"


class AppliedRules:
    """The common part of both callbacks; it reads the rules at once, so mistakes show before data is loaded."""

    def __init__(self, rules: api.Rules, *, names: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        inspect.signature(api.apply).bind(None, rules, start_step=0, **options)
        self.session: Session | None = None
        self._acting = False
        self._rules = api.load(rules)
        self._names = patterns_of(names)
        # A pattern that is none shows now; each training begins anew.
        self._curves = Curves(self._names)
        self._options = options
        self._on_event = options.pop("on_event", None)

    def _begin(self, model: nn.Module, start_step: int) -> Session:
        self._end()
        self._counts: Counter[str] = Counter()  # events so far by kind
        self._reported = self._counts.copy()
        self._logged: dict[int, int] = {}
        self._curves = Curves(self._names)
        session = api.apply(
            model, self._rules, start_step=start_step, on_event=self._note, **self._options
        )
        self.session = session
        self._acting = True
        warning = planning.curves_of_nothing(session.plan, self._names)
        if warning:
            self._warn(warning)
        return session

    def _warn(self, text: str) -> None:
        """Warn, and note the warning in the records as rules do."""
        if self.session is not None:
            log = attachment_of(self.session).context.event_log  # no rule emits it
            log.emit("notice", text, step=self.session.step, warn=True)

    def _warn_of_clip(self, clip: float | None, how: str) -> None:
        """Warn if the trainer clips norms before a rule that learns from norms sees them."""
        if not clip or self.session is None:
            return
        learning = [rule.id for rule in self.session.plan.rules.rules if rule.judges_first]
        if learning:
            self._warn(
                f"the trainer clips the norm of the gradients to {clip:g} before rule {learning[0]} sees it, so the rule "
                f"finds no spike: {how}, and clip by a `clip-norm` rule"
            )

    def _warn_of_restart(self, step: int, why: str) -> None:
        self._warn(
            f"training resumes at step {step:,}, but the rules start without what they had learnt: {why}"
        )

    def _end(self) -> None:
        """Remove the rules. The error of a check is raised unless the training ends by another one."""
        self._acting = False
        if self.session is not None:
            self.session.remove()

    def _note(self, event: Event) -> None:
        self._counts[event.kind] += 1
        if self._on_event is not None:
            self._on_event(event)

    def _metrics(self) -> dict[str, float]:
        """Return the last measurements of each rule, if they are new, and the counts of events. Waits for the device."""
        if not self._acting:
            return {}
        metrics: dict[str, float] = {}
        for row in self._new_rows():
            for name, value in self._curves.scalars(row).items():
                metrics[f"{_PREFIX}/{name}"] = value
        if not metrics and self._counts == self._reported:
            return {}
        self._reported = self._counts.copy()
        for kind, count in self._counts.items():
            metrics[f"{_PREFIX}/events/{kind}"] = float(count)
        return metrics

    def _new_rows(self) -> Iterator[RecordedRow]:
        session: Any = self.session
        for series in list(attachment_of(session).records):
            key = series.key
            # With accumulation, the row of a step that is not finished may be incomplete.
            finished = (row for row in reversed(series.rows) if row[0] < session.step)
            step, values, absent = next(finished, (-1, b"", None))
            if step > self._logged.get(id(key), -1):
                self._logged[id(key)] = step
                yield RecordedRow(key, step, values, absent)
