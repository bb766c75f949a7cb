"""Read rules and names for a review from files, commits, manifests, weights and models.

The repository may belong to a stranger, and its configuration can make git run commands. So this module
asks git for names and objects only: git runs hooks, filters, drivers and pagers when it checks out, shows or
compares. For an object that is missing, as in a partial clone, git would run a fetch command of the
repository. The variables below forbid fetching and disable all protocols.
"""

import os
import pathlib
import posixpath
import re
import shutil
import subprocess
from functools import cached_property

from gradsurgeon import packs, planning, schema, source
from gradsurgeon.errors import HintedError, Place, Problem, RuleFileError
from gradsurgeon.planning import Manifest, manifest_file
from gradsurgeon.review import model_loading
from gradsurgeon.schema import RuleSet

_SECONDS = 60
_LINK = "120000"
_NOUNS = {"tree": "folder", "commit": "submodule"}
# Users may set these for discovery. All other GIT_ variables could lead git to another repository.
_KEPT_VARIABLES = (
    "GIT_CEILING_DIRECTORIES",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
    "GIT_EXEC_PATH",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
)
_VARIABLES = {
    "LC_ALL": "C",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # for versions of git without GIT_NO_LAZY_FETCH
    # Replaced objects and grafts would show other content than the commit.
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_GRAFT_FILE": os.devnull,
    "GIT_LITERAL_PATHSPECS": "1",
}
_SETTINGS = ("core.commitGraph=false", "fetch.bundleURI=", "advice.graftFileDeprecated=false")
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
        raise _unreadable(spec, f"there is {what} the colon", example)
    tree = _GitTree(ref)
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


class _GitError(HintedError):
    """Git failed."""


class _GitTree:
    """The files of one commit; an implementation of `schema.Files`."""

    def __init__(self, ref: str) -> None:
        self.ref = ref  # a branch, a tag, or any other name of a commit

    def open(self, path: str) -> source.Document:
        return self._document(path, f"{self.ref}:{path}")

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        """Return the file of a relative entry: below ``folder``, in the same commit."""
        packs.check_portable(entry)
        inside = posixpath.normpath(entry)
        if inside == ".." or inside.startswith("../"):
            raise packs.leads_out(entry)
        target = pathlib.Path(posixpath.normpath(posixpath.join(folder.as_posix(), inside)))
        return packs.Included(f"{self.ref}:{target.as_posix()}", target, target.parent)

    def read(self, target: packs.Included) -> source.Document:
        return self._document(target.path.as_posix(), target.name)

    def _document(self, path: str, spec: str) -> source.Document:
        try:
            whole = self._from_top(path)
            raw = self._content(whole)
        except _GitError as error:
            raise _unreadable(spec, error.message, error.hint) from None
        return source.read(pathlib.Path(whole), spec, raw)

    @cached_property
    def _top(self) -> tuple[str, str]:
        """The current folder relative to the top folder, and the hash of the top folder in the commit."""
        # Read once, so that a branch that moves meanwhile changes nothing.
        options = ("--absolute-git-dir", "--show-prefix", "--verify", "--quiet")
        known = self.ref.isprintable() and not self.ref.startswith("-")
        printed = _ask("rev-parse", *options, f"{self.ref}^{{tree}}" if known else "", fails=True)
        git_dir, prefix, root, *_ = [*os.fsdecode(printed).split("\n"), "", ""]
        # A bare repository among the files of a clone would replace the real repository.
        if git_dir and pathlib.Path.cwd().resolve().is_relative_to(pathlib.Path(git_dir).resolve()):
            cause = f"the current folder is inside a bare repository: {git_dir}"
            hint = "run the command in a working tree, or write the file of the commit to the disk"
            raise _GitError(cause, hint)
        if not root:
            remote, _, branch = self.ref.partition("/")
            fetch = f"`git fetch {remote} {branch}`" if branch else "`git fetch`"
            hint = (
                f"try {fetch}; a checkout in CI may need the whole history; write `./` before the name of a file "
                "that holds a colon"
            )
            raise _GitError(f"`{self.ref[:60]}` names no commit", hint)
        return prefix, root

    def _content(self, path: str) -> bytes:
        listed = b"040000 tree -"
        if path != ".":
            listed = _ask("ls-tree", "-z", "--full-tree", self._top[1], "--", path)
        if not listed:
            hint = "paths are relative to the top of the repository, and with `./` to the current folder"
            raise _GitError(f"`{self.ref}` has no such file", hint)
        mode, kind, blob = listed.partition(b"\t")[0].decode().split(" ")
        if mode == _LINK:
            kind = "symbolic link, and links of a commit are not followed"
        if kind != "blob":
            raise _GitError(f"it is a {_NOUNS.get(kind, kind)}", "name a file of UTF-8 text")
        if int(_ask("cat-file", "-s", blob)) > source.MAX_BYTES:
            raise _GitError(f"over {source.MAX_BYTES // 1024} KiB of text", "use `include`")
        return _ask("cat-file", "blob", blob)

    def _from_top(self, path: str) -> str:
        if path.startswith(("./", "../")):
            path = posixpath.join(self._top[0], path)
        whole = posixpath.normpath(path)
        if whole == ".." or whole.startswith(("../", "/")):
            raise _GitError("the path leads out of the repository")
        return whole


def _unreadable(spec: str, cause: str, hint: str) -> RuleFileError:
    message = f"cannot read the file: {cause}"
    return RuleFileError([Problem(Place(spec, 1, 1), "unreadable-file", message, hint)])


def _ask(*arguments: str, fails: bool = False) -> bytes:
    """Return the output of git; with ``fails``, a failure without a message is no error."""
    # Relative folders on the path are skipped, because a repository could bring its own git.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    git = shutil.which("git", path=os.pathsep.join(filter(os.path.isabs, folders)))
    if git is None:
        raise _GitError("git is not installed")
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key in _KEPT_VARIABLES
    }
    try:
        done = subprocess.run(  # noqa: S603 # no shell, and no argument of a user begins with a dash
            (git, *(part for text in _SETTINGS for part in ("-c", text)), *arguments),
            env=kept | _VARIABLES,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise _GitError(f"git cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise _GitError(f"git took more than {_SECONDS} seconds") from None
    if done.returncode and (done.stderr or not fails):
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
        hint = (
            "this command fetches no missing objects of a partial clone; if you trust the repository, "
            "`git show` of the file fetches them"
        )
        if "not a git repository" in said:
            hint = "run the command inside the repository, or name two files"
        raise _GitError(f"git failed: {said or f'exit code {done.returncode}'}", hint)
    return done.stdout
