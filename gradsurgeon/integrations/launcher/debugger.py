"""`run --pdb`: the debugger, at the operation that made the NaN, then in the line of the script that a trap stopped."""

import pdb  # noqa: T100 # the user asked for it
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

import gradsurgeon
from gradsurgeon.common._patching import Patch
from gradsurgeon.errors import TrapError
from gradsurgeon.integrations.launcher.messages import say
from gradsurgeon.integrations.launcher.models import Models
from gradsurgeon.tensors import _dist

# The folders whose frames are not the script's.
_OURS = (str(Path(gradsurgeon.__file__).parent), str(Path(torch.__file__).parent))


def install(models: Models) -> None:
    Patch(sys, "excepthook", partial(_on_end, models))


def _on_end(
    models: Models,
    end: Callable[..., None],
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    end(kind, error, traceback)
    # The script may have raised another error from the trap's error.
    while error is not None and not isinstance(error, TrapError):
        error = error.__context__
    if error is None or error.__traceback__ is None:
        return
    if _dist.world() > 1:
        # The end of any rank makes torchrun end the others, the debugger with them.
        say("--pdb is for one process: run `gradsurgeon replay BUNDLE --pdb` on the bundle instead")
        return
    if getattr(error.diagnosis, "operation", "") and models.debug is not None:
        with ExitStack() as stack:
            for model in models.attached:
                stack.enter_context(model.attachment.context.resting())
            models.debug()
    say("the trap stopped the update: the debugger is in the line that took the step (`q` to quit)")
    cut_behind_the_script(error.__traceback__)
    pdb.post_mortem(error.__traceback__)


def cut_behind_the_script(traceback: TracebackType) -> None:
    """Drop the last frames of a traceback, which belong to gradsurgeon and torch."""
    last_of_script = traceback
    frame = traceback.tb_next
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            last_of_script = frame
        frame = frame.tb_next
    last_of_script.tb_next = None
