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
    complaints = {}
    for title, model in models.items():
        head = f"{printable(title)} is not the model of {printable(file)}"
        texts = [f"{head}: {text}; {_AGAIN}" for text in _differences(model, reviewed)]
        if texts:
            complaints[title] = texts
    return complaints


def _differences(model: Manifest, reviewed: Manifest) -> Iterator[str]:
    """Yield how the parameters of a model differ from those that were reviewed, each kind once."""
    now = {param.name: param for param in model.params}
    missing = []
    shapes = []
    ties = []
    for old in reviewed.params:
        param = now.pop(old.name, None)
        if param is None:
            missing.append(old.name)
            continue
        if param.shape != old.shape:
            shapes.append(f"{old.name} {_shape(param.shape)} instead of {_shape(old.shape)}")
        if set(param.aliases) != set(old.aliases):
            ties.append(old.name)
    differences = {
        "it lacks ": missing,
        "it also has ": list(now),
        "other shapes: ": shapes,
        "other tied names: ": ties,
    }
    for words, names in differences.items():
        if names:
            yield f"{words}{shorten_names(names)}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "unknown" if shape is None else str(list(shape))
