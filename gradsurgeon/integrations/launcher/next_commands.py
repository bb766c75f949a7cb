"""The commands to run next, filled in."""

import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from gradsurgeon.common.diagnosis import BUILD
from gradsurgeon.common.events import Event
from gradsurgeon.integrations.launcher.command import DEFAULT_RULES
from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.records.store.layout import is_taken


def after_records(record: Path | None, events: Sequence[Event], spec: str) -> Iterator[str]:
    """Yield the commands that read what a run has left."""
    if record is not None and record.is_dir():
        yield f"gradsurgeon report {shlex.quote(str(record))}"
    for event in events:
        if event.diagnosis and event.diagnosis["bundle"]:
            bundle = shlex.quote(event.diagnosis["bundle"])
            yield f"gradsurgeon replay {bundle} --model {spec}"
            return


def with_records(settings: Settings) -> str:
    """Return the command that runs the script again and keeps records; empty if another program started it."""
    if settings.record or "WORLD_SIZE" in os.environ:
        return ""
    words = ["gradsurgeon", "run"]
    if settings.rules != DEFAULT_RULES:
        words += ["--rules", os.path.relpath(settings.rules)]
    number = 1
    while is_taken(Path(f"runs/{number}")):
        number += 1
    words += ["--record", f"runs/{number}"]
    script = sys.orig_argv[1:]
    while script and script[0].startswith("-") and script[0] != "-m":
        script = script[1:]
    return shlex.join(words + script)


def model_spec(model: nn.Module) -> str:
    """Return what `--model` needs to build a model of the script anew, a placeholder if its class needs arguments."""
    kind = type(model)
    module = kind.__module__
    try:
        inspect.signature(kind).bind()
        if module == "__main__":
            # The script can be imported by its path from the working directory.
            file = Path(getattr(sys.modules[module], "__file__", ""))
            module = ".".join(file.relative_to(Path.cwd()).with_suffix("").parts)
    except (TypeError, ValueError):
        return BUILD
    # Containers of torch are empty without arguments. A class inside a function cannot be reached.
    if module.startswith("torch.") or "<" in kind.__qualname__:
        return BUILD
    return f"{module}:{kind.__qualname__}"
