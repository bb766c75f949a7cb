"""`--resume RUN`: what the rules on a model had learnt in an earlier run, and how far that run had come."""

from pathlib import Path

from gradsurgeon import _dist
from gradsurgeon.errors import GradSurgeonError, RecordError, printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.runtime import Attachment, state_file
from gradsurgeon.store.layout import database_name


def resume(session: Attachment, folder: Path, settings: Settings) -> None:
    """Let a model go on from what the rules on it have learnt in a run that has this directory.

    Raises:
        SystemExit: they cannot, and the launch is strict.
    """
    shown = printable(str(folder))
    try:
        found = state_file.read(folder)
        if found is not None:
            end = found.load(session.controller, step=settings.start_step)
            _tell_of_later(folder, end, settings.start_step)
            return
        text = f"{shown} cannot be resumed from: this model, or this rank, has no state in that run"
    except GradSurgeonError as error:
        text = str(error)
    if settings.strict:
        launch_status.refuse()
        say(f"error: {text}")
        raise SystemExit(launch_status.REFUSED) from None
    say(text)
    begin = "the rules begin anew with what they learn"
    if settings.start_step is None:
        begin += ", and steps are counted from 0: add --start-step N where the training of the script goes on"
    say(begin)


def _tell_of_later(folder: Path, end: int, start_step: int | None) -> None:
    """Say where a run has records of updates that its state, kept once a minute, knows nothing of."""
    from gradsurgeon.store.rank_file import RankFile  # noqa: PLC0415 # not before there is a database

    path = folder / database_name(0)
    if _dist.rank() or not path.is_file():
        return
    try:
        records = RankFile(path, 0)
        # A run that ended by itself may have had one more backward pass, without an update.
        last, first_unknown = records.last_step(), end + (records.closed is not None)
        records.close()
    except RecordError as error:
        say(f"whether the state is that of the end of the run is not known: {error}")
        return
    if last is None or last < first_unknown:
        return
    known = f"what the rules had learnt in {printable(str(folder))} is that before step {end:,}"
    why = f"its records go on to step {last:,}: it was ended by force, or could not write"
    if start_step is None:
        what = (
            f"steps are counted on from {end:,}; if the checkpoint of the script is another one, stop it "
            "and add --start-step N"
        )
    else:
        what = f"steps are counted on from {start_step:,}, as --start-step says"
    say(f"{known}, and {why}; {what}")
