"""Sees to it that a launched script ends as it would, with the summary and complete records."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import BindError, GradSurgeonWarning, printable
from gradsurgeon.launcher import exiting, telling
from gradsurgeon.launcher.debugger import Debugger
from gradsurgeon.launcher.importing import say
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.terminating import Termination
from gradsurgeon.planning import manifest_file


class Ending:
    """What is left to do when the process ends; in a process that never trained, nothing."""

    def __init__(self, settings: Settings, models: Models) -> None:
        self._settings = settings
        self._models = models
        self._pid = 0
        self._debugger = Debugger()
        self._expected = self._done = False

    def expect(self) -> None:
        """Prepare for the end: something more is going to be trained."""
        # What a session writes at its end is to come before its records are closed at exit.
        atexit.unregister(self._finish)
        atexit.register(self._finish)
        if self._expected:
            return
        self._expected = True
        # Of whoever trains: a forked worker may be the first to do so.
        self._pid = os.getpid()
        # Keep the records where the script leaves by `os._exit`, which runs nothing else.
        Patch(os, "_exit", self._leave)
        Termination(self._finish).expect()
        if self._settings.pdb:
            self._debugger.install()
            if why := self._never_stops():
                telling.write([f"gradsurgeon: --pdb will open no debugger: {why}"], _dist.rank())

    def _never_stops(self) -> str:
        """Return why no rule will ever stop an update, empty where one may."""
        if self._settings.observe:
            return "with --observe no rule stops an update"
        rules = self._models.rules
        if any(
            getattr(one, "then", "") == "raise" or hasattr(one, "give_up_after")
            for one in rules.rules
        ):
            return ""
        return f"no rule of {printable(rules.file)} stops an update, as `nan-trap` does"

    def _leave(self, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
        try:
            self._finish()
        finally:
            leave(exiting.code(status))

    def dry_run(self) -> None:
        """Print the plans, write the manifest and stop, where that is what was asked for.

        Raises:
            SystemExit: with 0, or with 2 where a manifest could not be written.
        """
        if not self._settings.dry_run or not self._models.attached:
            return
        self._done = True
        sys.exit(0 if self._show_plans() else exiting.REFUSED)

    def _show_plans(self) -> bool:
        """Print the plans and write the manifests; return whether all could be written."""
        written = True
        for number, one in enumerate(self._models.attached if _dist.rank() == 0 else ()):
            print(one.plan, flush=True)  # noqa: T201 # it is the product
            path = Path(self._settings.dry_run)
            if number:
                path = path.with_name(f"{path.stem}.{one.title}{path.suffix}")
            try:
                manifest_file.write(one.plan.manifest, path)
            except OSError as error:
                say(f"dry run: error: cannot write {printable(str(path))}: {error.strerror}")
                written = False
            else:
                say(f"dry run: wrote {printable(str(path))}")
        return written

    def _finish(self) -> None:
        """Take the rules off and say what they did."""
        if self._done or os.getpid() != self._pid:
            return  # A forked child ends its own way: the records are its parent's.
        self._done = True
        by_hand = self._models.updated()
        problems = self._models.conclude(by_hand)
        # Of a run that was refused nothing stays in the way of the next.
        stopped = _ended_by(BindError)
        refused = (stopped or self._models.refused is not None) and self._models.idle
        self._take_off(discard=refused)
        self._debugger.say_what_was_missed()
        if not self._models.attached or (refused and stopped):
            return  # The traceback tells why.
        if not self._models.fitting:
            # Without an optimizer that steps nobody has said so yet.
            problems += self._models.shortfalls()
        if self._settings.dry_run and by_hand and not problems:
            # Only one update, after which no backward pass came.
            if not self._show_plans():
                exiting.refuse()
        else:
            self._say(problems)

    def _take_off(self, *, discard: bool) -> None:
        with warnings.catch_warnings():
            # What there is to warn of at the end is in the summary.
            warnings.simplefilter("ignore", GradSurgeonWarning)
            for one in self._models.attached:
                if discard:
                    one.session.discard()
                    one.record = ""
                else:
                    one.session.remove()

    def _say(self, problems: Sequence[str]) -> None:
        """Say what the rules did, or why they could not."""
        attached = self._models.attached
        if self._models.refused is not None:
            on = "" if self._models.idle else ", and the script went on"
            problems = [f"the rules were refused{on}: {one}" for one in problems]
        if self._settings.dry_run:
            seen = "; ".join(map(telling.untrained, attached))
            text = (
                f"dry run: no optimizer took a step until the end, so that no plan was made: {seen}"
            )
            problems = [text, *problems]
        elif not self._settings.quiet:
            for one in attached:
                telling.summary(one)
        telling.write([f"gradsurgeon: error: {one}" for one in problems], attached[0].rank)
        if problems and (self._settings.strict or self._settings.dry_run):
            exiting.refuse()


def _ended_by(kind: type[BaseException]) -> bool:
    """Tell whether an error that nobody has caught ends the script."""
    return isinstance(getattr(sys, "last_value", None), kind)
