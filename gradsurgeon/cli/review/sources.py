"""Read rules and names for a review; git is asked for objects only, as its configuration may run commands."""

from __future__ import annotations

import os
import pathlib
import posixpath
import re
import shutil
import subprocess
from functools import partial
from typing import TYPE_CHECKING

from gradsurgeon.cli.review import model_loading
from gradsurgeon.errors import GradSurgeonError, Place, Problem, RuleFileError
from gradsurgeon.language import packs, planning, schema, source
from gradsurgeon.language.planning import Manifest, manifest_file
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.language.yaml_hints import OPEN_BOUND

if TYPE_CHECKING:
    from gradsurgeon.report.evidence.run_norms import RunNorms

_SECONDS = 60
# Users may set these for discovery. All other GIT_ variables could lead git to another repository.
_KEPT_VARIABLES = ("GIT_CEILING_DIRECTORIES", "GIT_CONFIG_", "GIT_DISCOVERY_", "GIT_EXEC_PATH")
_VARIABLES = {
    "LC_ALL": "C",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # for versions of git without GIT_NO_LAZY_FETCH
    # Replaced objects and grafts would show other content than the commit.
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_GRAFT_FILE": os.devnull,
}
_SETTINGS = (
    "-c",
    "core.commitGraph=false",
    # A bare repository among the files of a clone would replace the real repository.
    "-c",
    "safe.bareRepository=explicit",
)
_HINT = (
    "write REF:PATH with a path from the top of the repository; fetch the commit first, "
    "because nothing is fetched here; write `./` before the name of a file on disk that holds a colon"
)
_NO_NAMES = "name the model: `--model MODULE:NAME`, `--params FILE`, or `--on RUN` for the names of a recorded run"
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def manifest_of(
    params: str | None = None, model: str | None = None, run: RunNorms | None = None
) -> Manifest:
    """Return the names to bind rules to: those that were asked for, or those of a recorded run."""
    if params is not None:
        return manifest_file.read(params)
    if model is not None:
        return planning.from_model(model_loading.load_model(model))
    if run is None:
        raise GradSurgeonError(_NO_NAMES)
    return run.manifest


def rules_at(spec: str) -> RuleSet:
    """Return the rules of a file such as ``rules.yaml``, of ``origin/main:rules.yaml`` in a commit, or of a pack."""
    if spec.startswith(packs.PREFIX):
        return schema.validate(schema.pack(spec))
    ref, path = split(spec)
    if ref is None:
        return schema.validate(source.read(path))
    if path.startswith(("./", "../")):
        raise _unreadable(spec, "the path of a file in a commit begins at the top", _HINT)
    file = pathlib.Path(path)
    top = _Committed(f"{ref}:{path}", file, file.parent)
    return schema.validate(top.read(), partial(_find, ref))


def rules_with_open_bounds(path: str) -> tuple[RuleSet, frozenset[str]]:
    """Return rules as `rules_at`, and those whose bound is ``?``, which is allowed in a file on disk."""
    if split(path)[0] is not None:
        return rules_at(path), frozenset()
    text = source.read(path).text
    sides = []
    for digit in "12":
        # One character for another: every place stays as it is.
        closed = OPEN_BOUND.sub(digit, text).encode()
        sides.append(schema.validate(source.read(path, raw=closed)))
    rules, others = sides
    return rules, frozenset(rule.id for rule in rules.rules if rule not in others.rules)


def split(spec: str) -> tuple[str | None, str]:
    """Return commit, ``None`` for a file on disk, and path: a colon means a commit, unless a dot or slash is first."""
    if spec.startswith((".", "/", "\\")) or _DRIVE.match(spec):
        return None, spec
    ref, colon, path = spec.partition(":")
    if not colon:
        return None, spec
    return ref, path


def _find(ref: str, entry: str, folder: pathlib.Path) -> packs.Included:
    packs.check_portable(entry)
    inside = posixpath.normpath(entry)
    if inside == ".." or inside.startswith("../"):
        raise packs.leads_out(entry)
    target = folder / inside
    return _Committed(f"{ref}:{target.as_posix()}", target, target.parent)


class _Committed(packs.Included):
    """A file in a commit of git."""

    def read(self) -> source.Document:
        size = int(_ask(self.name, "cat-file", "-s"))
        if size > source.MAX_BYTES:
            cause = f"over {source.MAX_BYTES // 1024} KiB of text"
            raise _unreadable(self.name, cause, "use `include`")
        return source.read(self.path, self.name, _ask(self.name, "cat-file", "blob"))


def _unreadable(spec: str, cause: str, hint: str) -> RuleFileError:
    message = f"cannot read the file: {cause}"
    return RuleFileError([Problem(Place(spec, 1, 1), "unreadable-file", message, hint)])


def _ask(spec: str, *arguments: str) -> bytes:
    # Relative folders on the path are skipped, because a repository could bring its own git.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    git = shutil.which("git", path=os.pathsep.join(filter(os.path.isabs, folders)))
    if git is None:
        raise _unreadable(spec, "git is not installed", _HINT)
    variables = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key.startswith(_KEPT_VARIABLES)
    }
    variables |= _VARIABLES
    try:
        done = subprocess.run(  # noqa: S603 # no shell, and no argument of a user begins with a dash
            (git, *_SETTINGS, *arguments, "--end-of-options", spec),
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # ValueError: a NUL
        raise _unreadable(spec, f"git cannot be run: {error}", _HINT) from None
    if done.returncode:
        reason = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
        raise _unreadable(spec, f"git failed with exit code {done.returncode}: {reason}", _HINT)
    return done.stdout
