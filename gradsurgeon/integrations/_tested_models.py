"""Rules on the models that one test trains, from the start of its body to the end."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

from gradsurgeon.errors import BindError
from gradsurgeon.events import is_trip
from gradsurgeon.launcher.models import AttachedModel, Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.training_detector import TrainingDetector
from gradsurgeon.runtime import Attachment
from gradsurgeon.schema import RuleSet
from gradsurgeon.session import Session

_NOTHING_TRAINED = (
    "the body of the test trained no model: no torch optimizer took a step on the parameters of a module, so no "
    "rule could act. Training in a fixture does not count. Train in the body, or remove the marker"
)
_SWALLOWED = (
    "a gradient was non-finite, and the body of the test caught the error. Without rules, the marker always fails "
    "such a test; pass rules with a trap of your own to decide otherwise"
)


class TestedModels(Sequence[Session]):
    """Rules on all models that are trained within a ``with`` block: a sequence of their sessions so far."""

    def __init__(self, rules: RuleSet, *, observe: bool, fails: bool) -> None:
        self._models = Models(Settings(rules="", observe=observe, quiet=True), rules)
        self._detector = TrainingDetector(self._models)
        self._observe = observe
        self._fails = fails and not observe  # if a trap tripped
        self._made: dict[Attachment, Session] = {}

    def _sessions(self) -> list[Session]:
        trained = [model.session for model in self._models.attached if _is_trained(model)]
        return [self._made.setdefault(session, Session(session)) for session in trained]

    def __getitem__(self, index: Any) -> Any:
        return self._sessions()[index]

    def __len__(self) -> int:
        return len(self._sessions())

    def __repr__(self) -> str:
        return repr(self._sessions())

    def __enter__(self) -> Self:
        # pytest clears these next; the traceback of an earlier failure keeps the models of that test alive.
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        self._detector.install()
        # A fixture may have built the model, and the first step needs a diagnosis like any other.
        self._detector.search_built()
        return self

    def __exit__(self, *_: object) -> None:
        attached = self._models.attached
        with ExitStack() as stack:
            stack.callback(self._detector.uninstall)
            for model in list(attached):
                if _is_trained(model) or model.replaced:
                    stack.callback(model.session.remove)
                else:
                    attached.remove(model)
                    stack.callback(model.session.discard)

    def diagnosis(self) -> str:
        edits = {rule.id for rule in self._models.rules.rules if rule.edits}
        events = (event for session in self._sessions() for event in session.events)
        return "\n\n".join(event.message for event in events if is_trip(event, edits))

    def problem(self) -> str:
        """Return why the test fails although its body raised nothing; empty if it passes."""
        if not self:
            return _NOTHING_TRAINED
        try:
            self._models.check()
        except BindError as error:
            complaints = "\n".join(error.complaints)
            return f"has rules that do not fit what the test trains:\n{complaints}"
        if self._fails and self.diagnosis():
            return _SWALLOWED
        found = "" if self._observe else "\n".join(self._findings())
        return f"checks found a fault:\n{found}" if found else ""

    def _findings(self) -> Iterator[str]:
        """Yield what checks found. A check with `then: raise` has raised it in the body, which may expect it."""
        rules = self._models.rules.rules
        raising = {rule.id for rule in rules if getattr(rule, "then", "") == "raise"}
        for event in (event for session in self._sessions() for event in session.events):
            if event.kind == "check" and event.rule not in raising:
                yield event.message


def _is_trained(model: AttachedModel) -> bool:
    """Tell whether an update was attempted, or a rule fired: a trap may have stopped the first update."""
    session = model.session
    acted = session.step > model.start or any(one.fired for one in session.status().values())
    return acted and not model.replaced
