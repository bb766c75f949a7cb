"""Write the summary and complete the records at the end of a launched script, unless a signal kills it."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from gradsurgeon.common._patching import Patch
from gradsurgeon.errors import BindError, RecordError, printable
from gradsurgeon.integrations.launcher import debugger
from gradsurgeon.integrations.launcher.messages import say, write
from gradsurgeon.integrations.launcher.models import Models
from gradsurgeon.integrations.launcher.next_commands import with_records
from gradsurgeon.integrations.launcher.probing import probe
from gradsurgeon.integrations.launcher.summary import Told, prepare, summary
from gradsurgeon.language.planning import manifest_file
from gradsurgeon.runtime import Attachment


class ScriptEnd:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._settings = models.settings
        # The process that trains, which may be a forked worker; 0 if there is nothing left to do.
        self._pid = 0
        self._prepared = False
        # The last exit of the script by the number of steps before it.
        self._exits: dict[int, SystemExit | None] = {}
        # Whether no model is the one that was reviewed.
        self._refused = False
        # Whether a trap has stopped the last update, which only the end of the process can tell.
        self._stopped = False
        # Registered before functions of the script, so it runs after them.
        atexit.register(self._fail)

    def prepare(self) -> None:
        # Registered last, so it runs first: sessions write before their records are closed at exit.
        atexit.unregister(self._finish)
        atexit.register(self._finish)
        if self._prepared:
            return
        self._prepared = True
        prepare()
        self._pid = os.getpid()
        # A worker that `multiprocessing` forked runs no functions at exit.
        Finalize(None, self._finish, exitpriority=100)
        Patch(sys, "exit", self._note_exit)
        if self._settings.pdb:
            debugger.install(self._models)

    def _note_exit(self, original: Callable[..., None], *status: Any) -> None:
        """Remember the exit status, which Python forgets before the functions at exit run."""
        with self._models.guard:
            if threading.current_thread() is threading.main_thread():
                # A status of 0 is no failure, and hides no trap.
                self._exits[self._steps()] = SystemExit(*status) if any(status) else None
        original(*status)

    def _steps(self) -> int:
        return sum(model.attachment.step for model in self._models.attached)

    def first_step(self) -> None:
        unlike = self._models.unlike_reviewed()
        if unlike:
            self._refused = True
            say(str(BindError(unlike)))
            sys.exit(2)
        self._models.check()
        if self._settings.probe:
            self._pid = 0
            sys.exit(probe(self._models.attached))
        if not self._settings.dry_run or not self._models.attached:
            return
        self._pid = 0
        failed = self._models.rank == 0 and not self._write_plans()
        sys.exit(2 if failed else 0)

    def _write_plans(self) -> bool:
        """Print the plans and write the names of the models; tell whether all files were written."""
        complete = True
        for number, model in enumerate(self._models.attached):
            plan = model.attachment.plan
            print(plan, flush=True)  # noqa: T201 # the product of a dry run
            path = Path(self._settings.dry_run)
            if number:
                path = path.with_name(f"{path.stem}.{model.title}{path.suffix}")
            shown = printable(str(path))
            try:
                manifest_file.write(plan.manifest, path)
            except (OSError, RecordError) as error:
                say(f"dry run: error: cannot write {shown}: {printable(str(error))}")
                complete = False
            else:
                say(f"dry run: wrote {shown}")
        return complete

    def _finish(self) -> None:
        if os.getpid() != self._pid:
            return  # The records belong to the parent of a forked child.
        self._pid = 0
        models = self._models
        ended_by = getattr(sys, "last_value", None)
        with models.guard:
            # A script that has caught the exit and trained on has not ended by it.
            ended_by = ended_by or self._exits.get(self._steps())
        refused = self._refused or (isinstance(ended_by, BindError) and not models.checked)
        models.at_end = True
        # Failures of the command that gets events are recorded while records are open.
        with models.guard:
            models.event_command.finish()
            for model in models.attached[:1]:
                log = model.attachment.context.event_log
                for text in models.event_command.failures:
                    log.notice_once(text, text, step=model.attachment.step)
        for model in models.attached:
            with models.guard:
                # A refused run leaves no directory that would block the next run.
                if refused:
                    model.attachment.remove_with_records()
                else:
                    self._remove(model.attachment, ended_by)
        if not refused:  # a refusal has a traceback
            with models.guard:
                write(models.without_module(), models.rank)
                if models.attached:
                    self._write_summaries()
        # The command may read the records, which are complete.
        with models.guard:
            last = max((model.attachment.step for model in models.attached), default=0)
            models.event_command.end(last, models.rank, ended_by)

    def _remove(self, attachment: Attachment, ended_by: BaseException | None) -> None:
        """End a session, and say by which error of a trap it ends: no later step could raise it."""
        attachment.remove(ended_by)
        error = attachment.context.event_log.last_trap
        if error is not None:
            say(f"error: {error}")
            self._stopped = ended_by is None

    def _fail(self) -> None:
        """End the process with 1 if a trap stopped the last update: functions at exit cannot change the status otherwise."""
        if self._stopped:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(1)

    def _write_summaries(self) -> None:
        models = self._models
        settings = self._settings
        # If no optimizer took a step, the rules were never checked against the models.
        problems = []
        if settings.dry_run:
            problems.append("dry run: no optimizer took a step, so there is no plan")
        if settings.probe:
            problems.append("probe: no optimizer took a step, so nothing was asked")
        if not models.checked:
            problems += models.shortfalls()
        if not settings.quiet and not settings.dry_run:
            told: dict[Told, str] = {}
            for model in models.by_first_trip():
                lines = summary(model.attachment, model.start, model.record, model.like, told)
                write(lines, models.rank)
            command = with_records(settings)
            if command:
                write([f"gradsurgeon: next: {printable(command)}"], models.rank)
        for model in models.attached:
            # At the end of the process, warnings are no longer shown. Each rank names what it lost.
            lost = model.attachment.context.recorder.lost
            write([f"gradsurgeon: error: {model.title}: {text}" for text in lost], 0)
        write([f"gradsurgeon: error: {problem}" for problem in problems], models.rank)
