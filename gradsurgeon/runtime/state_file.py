"""The state of a session as a file: in a run directory, or beside the checkpoint of a trainer."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradsurgeon import _bounded_load, _dist
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import session_state
from gradsurgeon.store.files import replacing_bytes
from gradsurgeon.store.layout import state_name

if TYPE_CHECKING:
    from gradsurgeon.runtime.controller import Controller

_REMEDY = "resume from another file, or remove this one: then the rules restart what they learn"

_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class StateFile:
    path: Path
    # The content as read; `load` checks whether it is a state.
    content: Any
    # Empty, or a note that this is the file of another rank.
    notice: str = ""

    def load(self, controller: Controller, *, step: int | None = None) -> int:
        """Resume a session from the file, at another step if one is given; return the step of the state.

        Raises:
            GradSurgeonError: the file holds no session state; nothing has changed then.
        """
        try:
            end = session_state.load_state_dict(controller, self.content, step=step)
        except GradSurgeonError as error:
            raise GradSurgeonError(f"{printable(str(self.path))}: {error}") from None
        if self.notice:
            at = controller.context.counters.latest
            controller.context.event_log.emit("notice", self.notice, step=at)
        return end


def read(folder: Path) -> StateFile | None:
    """Return the state that this rank left in a directory, else rank 0's state; ``None`` if neither exists.

    Raises:
        GradSurgeonError: the file cannot be read.
    """
    rank, notice = _dist.rank(), ""
    path = folder / state_name(rank)
    if not path.exists():  # There are more ranks than before; the state is alike on all of them.
        path = folder / state_name(0)
        notice = f"rank {rank} has no state in {printable(str(folder))}, and resumes from the state of rank 0"
    try:
        return StateFile(path, _bounded_load.load(path, _MOST_BYTES), notice)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"cannot be read: {printable(error.strerror or str(error))}"
    except _bounded_load.RefusedError as error:
        why = printable(str(error))
    raise GradSurgeonError(f"{printable(str(path))}: {why}; {_REMEDY}")


def write(folder: Path, controller: Controller) -> None:
    """Write this rank's state into a directory, instead of an earlier one. Waits for the device.

    Raises:
        OSError: the file cannot be written.
    """
    file = io.BytesIO()
    torch.save(session_state.state_dict(controller), file)
    with replacing_bytes(folder / state_name(_dist.rank())) as target:
        target.write(file.getvalue())
    # An earlier training with more ranks has left files that must not pass for files of this training.
    for path in folder.glob(state_name("*")) if _dist.rank() == 0 else ():
        of = path.stem.rpartition("-")[2]
        if of.isdecimal() and int(of) >= _dist.world():
            path.unlink()
