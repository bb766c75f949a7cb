"""`gradsurgeon probe`: questions to the models of a script at its first update, and what cannot be put back."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from gradsurgeon.errors import reason_of
from gradsurgeon.integrations.launcher.messages import say

_NOTHING_ASKED = 2
_MOST_FILES = 3
_ENVIRONMENTS = "environments of {} stay where the script has brought them, and a model that advances one does so again"
_ALONE = "ranks wait for each other in a further call, so only a script of one process can be asked: start it without torchrun"
_AGAIN = "{} is called again with the batch of the first update, and with other samples of it; then all of it is put back"
_GYMS = {"gym", "gymnasium", "dm_env", "pettingzoo"}


def tell_writes() -> None:
    """Tell of the first files that the script writes, right before it does."""
    shown: set[str] = set()

    def hear(event: str, args: tuple[Any, ...]) -> None:
        # Compiled modules and temporary files are opened exclusively, and a file of the launcher tells that rules act.
        if event != "open" or not args[2] & (os.O_WRONLY | os.O_RDWR) or args[2] & os.O_EXCL:
            return
        path = args[0]
        is_file = isinstance(path, str) and not path.startswith("/dev/")
        if (
            is_file
            and "gradsurgeon-" not in path
            and path not in shown
            and len(shown) < _MOST_FILES
        ):
            shown.add(path)
            say(f"probe: the script writes {path!a}, which stays written")

    sys.addaudithook(hear)


def probe(models: Iterable[Any]) -> int:
    """Print the answers on each model of a launch; return the exit status."""
    from gradsurgeon.forensics.probe import FOUND, answers  # noqa: PLC0415 # torch is imported by now
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # as above

    if _dist.world() > 1:
        say(f"probe: error: {_ALONE}")
        return _NOTHING_ASKED
    for name in _GYMS.intersection(sys.modules):
        say(f"probe: {_ENVIRONMENTS.format(name)}")
    status = _NOTHING_ASKED
    for model in models:
        model.attachment.context.is_paused = True
        step = model.attachment.controller.kept.step
        calls = {call.name: call for call in reversed(step.calls) if call.number}
        for call in calls.values():
            say(f"probe: {_AGAIN.format(call.prefix + model.title)}")
            try:
                texts = list(answers(call, call.module(), step.losses.get(call.number)))
            except Exception as error:  # noqa: BLE001 # the code of the script may raise anything
                say(f"probe: error: a further call failed: {reason_of(error)}")
                return _NOTHING_ASKED
            print(*texts, sep="\n")  # noqa: T201 # the product of the command
            status %= _NOTHING_ASKED
            if any(text.startswith(FOUND) for text in texts):
                status = 1
    if status == _NOTHING_ASKED:
        say(
            "probe: error: no call of a model was kept before the first update, so nothing was asked"
        )
    return status
