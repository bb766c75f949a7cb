"""Whether a model is the one whose names were reviewed."""

import os
from collections.abc import Iterator, Mapping

from gradsurgeon.errors import BindError, printable, shorten_names
from gradsurgeon.language.planning import manifest_file
from gradsurgeon.language.planning.manifest import Manifest

_AGAIN = "review the plan on this model, and write its names by `gradsurgeon params`"


def check_reviewed(model: Manifest, path: str | os.PathLike[str] | None) -> None:
    """Raise `BindError` if names, shapes or ties of a model differ from those in a file, if there is one."""
    if path is not None:
        complaints = complaints_of({model.origin: model}, os.fspath(path))
        if complaints:
            raise BindError(complaints[model.origin])


def complaints_of(models: Mapping[str, Manifest], file: str) -> dict[str, list[str]]:
    """Return by title what is to be said of each model whose names, shapes or ties differ from those in a file."""
    reviewed = manifest_file.read(file)
    complaints: dict[str, list[str]] = {}
    for title, model in models.items():
        head = f"{printable(title)} is not the model of {printable(file)}"
        for text in _differences(model, reviewed):
            complaints.setdefault(title, []).append(f"{head}: {text}; {_AGAIN}")
    return complaints


def _differences(model: Manifest, reviewed: Manifest) -> Iterator[str]:
    """Yield how the parameters of a model differ from those that were reviewed, each kind once."""
    now = {param.name: param for param in model.params}
    before = {param.name: param for param in reviewed.params}
    missing = [name for name in before if name not in now]
    if missing:
        yield f"it lacks {shorten_names(missing)}"
    new = [name for name in now if name not in before]
    if new:
        yield f"it also has {shorten_names(new)}"
    shapes = []
    ties = []
    for name, param in now.items():
        old = before.get(name)
        if old is None:
            continue
        if param.shape != old.shape:
            shapes.append(f"{name} {_shape(param.shape)} instead of {_shape(old.shape)}")
        if set(param.aliases) != set(old.aliases):
            ties.append(name)
    if shapes:
        yield f"other shapes: {shorten_names(shapes)}"
    if ties:
        yield f"other tied names: {shorten_names(ties)}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "unknown" if shape is None else str(list(shape))
