"""What an error of this package does to the script: chosen rules raise it, rules of a pack report it in one line and rest.

Nobody wrote a pack for this script. So a set-up that the pack cannot honour must not end the script, and neither must
a fault of this package.
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsurgeon.actions import Rule
from gradsurgeon.common.events import NO_RULE_ACTS, OUR_FAULT
from gradsurgeon.errors import BindError, GradSurgeonError, TrapError, printable, shorten_names
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._torch import uncompiled

_PACKAGE = Path(__file__).parents[1]
# The place and the rule that begin a complaint.
_RULE = re.compile(r"^.*?\brule [a-z0-9-]+: ")


class Guard:
    """A context manager around code of this package that runs inside a script.

    If it is lenient, it turns each error of that code into one line. It never holds back the verdict of a trap.
    """

    def __init__(self, say: Callable[[str], None], *, lenient: bool) -> None:
        self.lenient = lenient
        self._say = say
        self._said: set[str] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(error, Exception) and self.goes_on_after(error)

    def goes_on_after(self, error: Exception) -> bool:
        """Report an error if the script is to go on; return whether it is. Code that runs often calls this on errors alone."""
        if not self.lenient or isinstance(error, TrapError) or _torch.is_control_flow(error):
            return False
        with suppress(Exception):  # a second fault must not end the script either
            self.report(error)
        return True

    def report(self, error: Exception) -> None:
        """Report an error that ended the work inside."""
        text = NO_RULE_ACTS + reason(error)
        if text not in self._said:
            self._said.add(text)
            self._say(text)


class Hook:
    """A hook on a tensor or module. It reaches a part of its session weakly, and never travels with a copy."""

    # torch warns when a script pickles a tensor with hooks for another process, unless this
    # attribute marks the hook.
    __torch_unserializable__ = True
    # Does the work of the hook, given that part of the session and what torch passes.
    run: Callable[..., Any]

    def __init__(self, target: object) -> None:
        self._target: weakref.ref[Any] = weakref.ref(target)

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        target = self._target()
        if target is None:
            return None
        try:
            return self.run(target, *args)
        except Exception as error:
            if not target.context.refusals.goes_on_after(error):
                raise
        return None


def all_go_on_after(guards: Sequence[Guard], error: Exception) -> bool:
    """Report an error in work for several sessions; return whether the script goes on: all of them must be lenient."""
    if not guards or not all(guard.lenient for guard in guards):
        return False
    return all(guard.goes_on_after(error) for guard in guards)


class Refusals(Guard):
    """The guard of a session: it knows the rules, so those that a set-up refuses rest while the others act."""

    def __init__(
        self,
        event_log: EventLog,
        rules: Iterable[Rule],
        *,
        lenient: bool,
    ) -> None:
        super().__init__(event_log.warn, lenient=lenient)
        self._event_log = event_log
        self._rules = [rule.id for rule in rules]
        # The rules that never act again.
        self.resting: set[str] = set()
        self._last_acts: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._abstained = False
        # Whether all rules rest, so the session does nothing more.
        self.over = False

    def lets_act(self, rule: Rule, step: int) -> bool:
        return rule.id not in self.resting and rule.steps.includes(step)

    def at_last(self, act: Callable[[], None]) -> None:
        """Call a method once all rules rest. It is held weakly."""
        self._last_acts.append(weakref.WeakMethod(act))

    def refuse(self, error: GradSurgeonError, rules: Collection[str]) -> None:
        """Raise an error about some rules. Rules of a pack rest from now on instead."""
        if not self.lenient:
            raise error
        self._rest(error, rules)

    def refuse_rules(self, rules: Iterable[str], why: str) -> None:
        """Refuse rules, if there are any, for one reason."""
        self.refuse_complaints({rule: [f"rule {rule}: {why}"] for rule in rules})

    def refuse_complaints(self, refused: Mapping[str, Sequence[str]]) -> None:
        """Refuse rules, if there are any, each with the complaints of a plan."""
        if refused:
            self.refuse(BindError([*chain.from_iterable(refused.values())]), refused.keys())

    def abstain(self, error: GradSurgeonError) -> None:
        """Raise an error about this moment alone. A pack reports the first one, and its caller leaves the moment out."""
        if not self.lenient:
            raise error
        if not self._abstained:
            self._abstained = True
            self._emit(reason(error), ())

    def soften_skips(self, rules: Iterable[str], why: str) -> None:
        """Report traps that would skip updates, and only warn from now on."""
        for rule in rules:
            self._emit(f"only warns: {why}", [rule])

    def report(self, error: Exception) -> None:
        self._rest(error, self._rules)

    def _rest(self, error: Exception, rules: Collection[str]) -> None:
        news = [rule for rule in rules if rule not in self.resting]
        if not news:
            return
        self.resting.update(news)
        for rule in news:
            # It does not act for a reason that the user knows.
            self._event_log.silent.pop(rule, None)
        self.over = self.resting.issuperset(self._rules)
        if not self.over:
            verb = "rests" if len(news) == 1 else "rest"
            self._emit(f"{verb}: {reason(error)}", news)
            return
        self._emit(NO_RULE_ACTS + reason(error), ())
        for reference in self._last_acts:
            with suppress(Exception):
                act = reference()
                if act is not None:
                    act()

    def _emit(self, text: str, rules: Collection[str]) -> None:
        """Warn, and record the warning as an event; a recorder that fails must not suppress the warning."""
        rule = ""
        if len(rules) == 1:
            (rule,) = rules
        if len(rules) > 1:
            text = f"{shorten_names([*rules])} {text}"
        self._event_log.warn(text, rule=rule)
        with suppress(Exception):
            self._event_log.emit("notice", text, rule=rule)


def reason(error: Exception) -> str:
    """Return in one line why rules cannot act."""
    if isinstance(error, BindError):
        complaints = [_RULE.sub("", text, 1) for text in error.complaints]
        return "; ".join(dict.fromkeys(complaints))
    text = printable(str(error).partition("\n")[0])
    if isinstance(error, GradSurgeonError):
        return _RULE.sub("", text, 1)
    failure = _torch.device_failure(error)
    if failure:
        return printable(failure)
    return f"{type(error).__name__}: {text} ({_place(error)}; {OUR_FAULT})"


def _place(error: Exception) -> str:
    """Return file and line of the last frame of this package in a traceback."""
    place = "unknown place"
    traceback = error.__traceback__
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            place = f"{file.relative_to(_PACKAGE)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
