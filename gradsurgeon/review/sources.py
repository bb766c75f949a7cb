"""Where a review gets rules and names from: files, commits, manifests, weights, models."""

from __future__ import annotations

import re

from gradsurgeon import planning, schema, source
from gradsurgeon.planning import Manifest, manifest_file
from gradsurgeon.review import model_loading
from gradsurgeon.review.git_tree import GitTree, unreadable
from gradsurgeon.schema import Files, RuleSet

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def manifest_of(params: str | None = None, model: str | None = None) -> Manifest:
    """Return the names that rules are planned on. Only a model needs torch, and runs code.

    Args:
        params: a ``params.json``, a ``*.safetensors``, or a ``*.index.json``.
        model: ``MODULE:NAME`` of what builds the model, or of the model itself.

    Raises:
        ManifestError: the file is wrong or cannot be read.
        ModelError: the model cannot be imported or built.
        ValueError: not exactly one of the two is given.
    """
    if params is not None and model is None:
        return manifest_file.read(params)
    if model is not None and params is None:
        return planning.from_model(model_loading.load_model(model))
    raise ValueError("either a file with names or a model is needed, and not both")


def rules_at(spec: str) -> RuleSet:
    """Return the rules of a file: ``rules.yaml`` of the disk, ``origin/main:rules.yaml`` of a commit.

    What a file of a commit includes is read from that commit.

    Raises:
        RuleFileError: with every problem found.
    """
    return schema.validate(*open_rules(spec))


def open_rules(spec: str) -> tuple[source.Document, Files]:
    """Return a rule file, and where the files are that it includes.

    Raises:
        RuleFileError: it cannot be read.
    """
    ref, path = split(spec)
    if ref is None:
        return source.read(path), schema.DISK
    if not ref or not path:
        what = "no commit before" if not ref else "no file behind"
        example = "write REF:PATH, such as HEAD:rules.yaml"
        raise unreadable(spec, f"there is {what} the colon", example)
    tree = GitTree(ref)
    return tree.open(path), tree


def split(spec: str) -> tuple[str | None, str]:
    """Return the commit and the path in a text; the commit is ``None`` for a file on disk.

    A colon always means a commit, whatever files there are: otherwise a branch could add a file of
    that name, and be compared with it instead of with the commit. ``./a:b.yaml`` is a file, as no name
    of a commit begins with a dot or a slash; so is a path with a Windows drive.
    """
    if spec.startswith((".", "/", "\\")) or _DRIVE.match(spec):
        return None, spec
    depth = 0  # `main@{10:00}` and `HEAD^{/fix: it}` hold colons of their own
    for at, char in enumerate(spec):
        depth += (char == "{") - (char == "}")
        if char == ":" and depth <= 0:
            return spec[:at], spec[at + 1 :]
    return None, spec
