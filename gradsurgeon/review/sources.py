"""Read rules and names for a review from files, commits, manifests, weights and models."""

import re

from gradsurgeon import planning, schema, source
from gradsurgeon.planning import Manifest, manifest_file
from gradsurgeon.review import model_loading
from gradsurgeon.review.git_tree import GitTree, unreadable
from gradsurgeon.schema import RuleSet

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def manifest_of(params: str | None = None, model: str | None = None) -> Manifest:
    """Return the names in a file, or the names of the model ``MODULE:NAME``, whose code runs."""
    if params is not None:
        return manifest_file.read(params)
    return planning.from_model(model_loading.load_model(model or ""))


def rules_at(spec: str) -> RuleSet:
    """Return the rules of a file such as ``rules.yaml``, or of ``origin/main:rules.yaml`` in a commit."""
    ref, path = split(spec)
    if ref is None:
        return schema.validate(source.read(path))
    if not ref or not path:
        what = "no commit before" if not ref else "no file behind"
        example = "write REF:PATH, such as HEAD:rules.yaml"
        raise unreadable(spec, f"there is {what} the colon", example)
    tree = GitTree(ref)
    return schema.validate(tree.open(path), tree)


def split(spec: str) -> tuple[str | None, str]:
    """Return the commit and the path in a text; the commit is ``None`` for a file on disk.

    A colon always means a commit. Otherwise a branch could add a file of that name, and the review would
    compare with the file. ``./a:b.yaml`` is a file, because no commit begins with a dot or a slash; a path
    with a Windows drive is a file, too.
    """
    if spec.startswith((".", "/", "\\")) or _DRIVE.match(spec):
        return None, spec
    ref, colon, path = spec.partition(":")
    return (ref, path) if colon else (None, spec)
