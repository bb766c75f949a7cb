"""The rules on the models that one test trains: put on before its body, and taken off after it."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self, overload

from gradsurgeon.errors import BindError
from gradsurgeon.events import is_trip
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.summary import AttachedModel
from gradsurgeon.launcher.training_detector import TrainingDetector
from gradsurgeon.runtime import Attachment
from gradsurgeon.schema import RuleSet
from gradsurgeon.session import Session

_NOTHING_TRAINED = (
    "the body of the test trained no model: no optimizer of torch came to a step on the parameters of a module, so "
    "that no rule could act. What a fixture trains does not count. Train in the body, or take the marker off"
)
_SWALLOWED = (
    "a gradient was not finite, and the body of the test went on. With a trap of its own (a rule file or a dict) it "
    "decides by itself what that means; the marker without rules always fails it"
)


class TestedSessions(Sequence[Session]):
    """The sessions on the models that the test has trained so far, in the order in which these were found."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._made: dict[Attachment, Session] = {}

    def _now(self) -> list[Session]:
        trained = [model.session for model in self._models.attached if is_trained(model)]
        return [self._made.setdefault(session, Session(session)) for session in trained]

    @overload
    def __getitem__(self, index: int) -> Session: ...
    @overload
    def __getitem__(self, index: slice) -> list[Session]: ...
    def __getitem__(self, index: int | slice) -> Session | list[Session]:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())


def is_trained(model: AttachedModel) -> bool:
    """Tell whether an update has been attempted, or a rule has acted: a trap may have stopped the first one."""
    session = model.session
    acted = session.step > model.start or any(one.fired for one in session.status().values())
    return acted and not model.replaced


class TestedModels:
    """Rules on whatever is trained within a ``with`` block."""

    def __init__(self, rules: RuleSet, *, observe: bool, fails: bool) -> None:
        self._models = Models(Settings(rules="", observe=observe, quiet=True), rules)
        self._detector = TrainingDetector(self._models)
        self._fails = fails and not observe  # whenever a trap has tripped
        self.sessions = TestedSessions(self._models)

    def __enter__(self) -> Self:
        # As pytest itself does next: the traceback of a test that failed before keeps the models of that one.
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        self._detector.install()
        # Fixtures may have built them, and the first step is to be diagnosed as any other.
        self._detector.search_built()
        return self

    def __exit__(self, *_: object) -> None:
        attached = self._models.attached
        with ExitStack() as stack:
            stack.callback(self._detector.uninstall)
            for model in list(attached):
                if is_trained(model) or model.replaced:
                    stack.callback(model.session.remove)
                else:
                    attached.remove(model)
                    stack.callback(model.session.discard)

    def diagnosis(self) -> str:
        """Return the reports of all traps that have tripped."""
        trips = [
            event
            for session in self.sessions
            for event in session.events
            if is_trip(event, {rule.id for rule in session.plan.rules.rules if rule.edits})
        ]
        return "\n\n".join(event.message for event in trips)

    def problem(self) -> str:
        """Return why the test fails although its body came to its end; empty if it does not."""
        if not self.sessions:
            return _NOTHING_TRAINED
        try:
            self._models.check()
        except BindError as error:
            complaints = "\n".join(error.complaints)
            return f"has rules that do not fit what the test trains:\n{complaints}"
        return _SWALLOWED if self._fails and self.diagnosis() else ""
