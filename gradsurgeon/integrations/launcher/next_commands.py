"""The commands to run next, filled in."""

import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from gradsurgeon.common.events import Event
from gradsurgeon.integrations.launcher.command import DEFAULT_RULES
from gradsurgeon.integrations.launcher.model_roots import name_of
from gradsurgeon.integrations.launcher.settings import Settings

_BUILD = "MODULE:BUILD"
_REPLAY = re.compile(rf"gradsurgeon replay .* --model {_BUILD}")


def after_records(record: Path | None, events: Sequence[Event], spec: str) -> Iterator[str]:
    """Yield the commands that read what a run has left."""
    if record is not None and record.is_dir():
        yield f"gradsurgeon report {shlex.quote(str(record))}"
    for event in events:
        replay = _REPLAY.search(event.message)
        if replay is not None:
            yield replay[0].replace(_BUILD, spec)
            return


def with_records(settings: Settings) -> str:
    """Return the command that runs the script again and keeps records; empty if another program started it."""
    if settings.record or "WORLD_SIZE" in os.environ:
        return ""
    words = ["gradsurgeon", "run"]
    if settings.rules != DEFAULT_RULES:
        words += ["--rules", _shown(Path(settings.rules))]
    words += ["--record", "runs/1", *_script()]
    return shlex.join(words)


def _script() -> list[str]:
    """Return the script and its arguments."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    return words


def _shown(path: Path) -> str:
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def model_spec(model: nn.Module) -> str:
    """Return what `--model` needs to build a model of the script anew."""
    kind = type(model)
    module = kind.__module__
    name = kind.__qualname__
    if module.partition(".")[0] == "torch" or not _builds_alone(kind):
        module = "__main__"
        name = name_of(model)
    if module == "__main__":
        module = _script_module()
    if not module or not name or "<" in name:
        return _BUILD
    return f"{module}:{name}"


def _builds_alone(kind: type) -> bool:
    try:
        params = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(param.default is not param.empty or param.kind in kinds for param in params)


def _script_module() -> str:
    """Return the name by which the script can be imported from the working directory, empty if there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return ""
    shown = Path(_shown(Path(file).absolute()))
    parts = shown.with_suffix("").parts
    if shown.is_absolute() or not all(part.isidentifier() for part in parts):
        return ""
    return ".".join(parts)
