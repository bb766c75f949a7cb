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
from gradsurgeon.launcher import exit_code
from gradsurgeon.launcher.debugger import Debugger
from gradsurgeon.launcher.messages import say, write
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.sigterm import SigtermHandler
from gradsurgeon.launcher.summary import untrained, write_summary
from gradsurgeon.planning import manifest_file


class ScriptEnd:
    """What is left to do when the process ends; in a process that never trained, nothing."""

    def __init__(self, settings: Settings, models: Models) -> None:
        self._settings = settings
        self._models = models
        self._pid = 0
        self._debugger = Debugger()
        self._prepared = self._done = False

    def prepare(self) -> None:
        """Prepare for the end: something more is going to be trained."""
        # What a session writes at its end is to come before its records are closed at exit.
        atexit.unregister(self._finish)
        atexit.register(self._finish)
        if self._prepared:
            return
        self._prepared = True
        # Of whoever trains: a forked worker may be the first to do so.
        self._pid = os.getpid()
        # Keep the records where the script leaves by `os._exit`, which runs nothing else.
        Patch(os, "_exit", self._exit)
        SigtermHandler(self._finish).install()
        if self._settings.pdb:
            self._debugger.install()
            if why := self._why_nothing_stops():
                write([f"gradsurgeon: --pdb will open no debugger: {why}"], _dist.rank())

    def _why_nothing_stops(self) -> str:
        """Return why no rule will ever stop an update, empty where one may."""
        if self._settings.observe:
            return "with --observe no rule stops an update"
        rules = self._models.rules
        if any(
            getattr(rule, "then", "") == "raise" or hasattr(rule, "give_up_after")
            for rule in rules.rules
        ):
            return ""
        return f"no rule of {printable(rules.file)} stops an update, as `nan-trap` does"

    def _exit(self, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
        try:
            self._finish()
        finally:
            leave(exit_code.instead_of(status))

    def dry_run(self) -> None:
        """Print the plans, write the manifest and stop, where that is what was asked for.

        Raises:
            SystemExit: with 0, or with 2 where a manifest could not be written.
        """
        if not self._settings.dry_run or not self._models.attached:
            return
        self._done = True
        sys.exit(0 if self._show_plans() else exit_code.REFUSED)

    def _show_plans(self) -> bool:
        """Print the plans and write the manifests; return whether all could be written."""
        written = True
        for number, model in enumerate(self._models.attached if _dist.rank() == 0 else ()):
            print(model.plan, flush=True)  # noqa: T201 # it is the product
            path = Path(self._settings.dry_run)
            if number:
                path = path.with_name(f"{path.stem}.{model.title}{path.suffix}")
            try:
                manifest_file.write(model.plan.manifest, path)
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
        updated = self._models.updated_by_hand()
        problems = self._models.conclude(updated)
        # Of a run that was refused nothing stays in the way of the next.
        stopped = _ended_by(BindError)
        refused = (stopped or self._models.refused is not None) and self._models.is_unused
        self._remove_rules(discard=refused)
        self._debugger.say_what_was_missed()
        if not self._models.attached or (refused and stopped):
            return  # The traceback tells why.
        if not self._models.fitting:
            # Without an optimizer that steps nobody has said so yet.
            problems += self._models.shortfalls()
        if self._settings.dry_run and updated and not problems:
            # Only one update, after which no backward pass came.
            if not self._show_plans():
                exit_code.refuse()
        else:
            self._say(problems)

    def _remove_rules(self, *, discard: bool) -> None:
        with warnings.catch_warnings():
            # What there is to warn of at the end is in the summary.
            warnings.simplefilter("ignore", GradSurgeonWarning)
            for model in self._models.attached:
                if discard:
                    model.session.discard()
                    model.record = ""
                else:
                    model.session.remove()

    def _say(self, problems: Sequence[str]) -> None:
        """Say what the rules did, or why they could not."""
        attached = self._models.attached
        if self._models.refused is not None:
            on = "" if self._models.is_unused else ", and the script went on"
            problems = [f"the rules were refused{on}: {problem}" for problem in problems]
        if self._settings.dry_run:
            seen = "; ".join(map(untrained, attached))
            text = (
                f"dry run: no optimizer took a step until the end, so that no plan was made: {seen}"
            )
            problems = [text, *problems]
        elif not self._settings.quiet:
            for model in attached:
                write_summary(model)
        write([f"gradsurgeon: error: {problem}" for problem in problems], attached[0].rank)
        if problems and (self._settings.strict or self._settings.dry_run):
            exit_code.refuse()


def _ended_by(kind: type[BaseException]) -> bool:
    """Return whether an error that nobody has caught ends the script."""
    return isinstance(getattr(sys, "last_value", None), kind)
