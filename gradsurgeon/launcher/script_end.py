"""Sees to it that a launched script ends as it would, with the summary and complete records."""

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import BindError, GradSurgeonWarning, printable
from gradsurgeon.launcher import debugger, launch_status
from gradsurgeon.launcher.messages import say, write
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.sigterm import SigtermHandler
from gradsurgeon.launcher.summary import write_failures, write_summary
from gradsurgeon.planning import manifest_file


class ScriptEnd:
    """What is left to do when the process ends; in a process that never trained, nothing."""

    def __init__(self, settings: Settings, models: Models) -> None:
        self._settings = settings
        self._models = models
        self._pid = 0
        self._prepared = self._done = False

    def prepare(self) -> None:
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
            debugger.install()

    def _exit(self, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
        try:
            self._finish()
        finally:
            leave(launch_status.exit_code_for(status))

    def dry_run(self) -> None:
        """Print the plans, write the manifests and stop, where that is what was asked for."""
        if not self._settings.dry_run or not self._models.attached:
            return
        self._done = True
        code = 0
        for number, model in enumerate(self._models.attached if _dist.rank() == 0 else ()):
            print(model.plan, flush=True)  # noqa: T201 # it is the product
            path = Path(self._settings.dry_run)
            if number:
                path = path.with_name(f"{path.stem}.{model.title}{path.suffix}")
            try:
                manifest_file.write(model.plan.manifest, path)
            except OSError as error:
                say(f"dry run: error: cannot write {printable(str(path))}: {error.strerror}")
                code = launch_status.REFUSED
            else:
                say(f"dry run: wrote {printable(str(path))}")
        sys.exit(code)

    def _finish(self) -> None:
        if self._done or os.getpid() != self._pid:
            return  # A forked child ends its own way: the records are its parent's.
        self._done = True
        models = self._models
        ended_by = getattr(sys, "last_value", None)
        refused = isinstance(ended_by, BindError) and not models.fitting
        with warnings.catch_warnings():
            # What there is to warn of at the end is in the summary.
            warnings.simplefilter("ignore", GradSurgeonWarning)
            for model in models.attached:
                # Of a run that was refused nothing stays in the way of the next.
                if refused:
                    model.session.discard()
                else:
                    model.session.remove()
        if models.attached and not refused:  # Otherwise the traceback tells why.
            self._say()

    def _say(self) -> None:
        # Without an optimizer that steps nobody has said so yet.
        problems = [] if self._models.fitting else self._models.shortfalls()
        if self._settings.dry_run:
            text = "dry run: no optimizer took a step until the end, so that no plan was made"
            problems = [text, *problems]
        elif not self._settings.quiet:
            for model in self._models.attached:
                write_summary(model)
        for model in self._models.attached:
            write_failures(model)
        rank = self._models.attached[0].rank
        write([f"gradsurgeon: error: {problem}" for problem in problems], rank)
        if problems and (self._settings.strict or self._settings.dry_run):
            launch_status.refuse()
