"""The files of a commit, read by asking git: a rule file as it was, with the includes as they were.

Git is asked for objects by their hash only. Nothing is checked out, and nothing that a repository may
bring along is run: see `git_repository`.
"""

from __future__ import annotations

import pathlib
import posixpath
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from gradsurgeon import packs, source
from gradsurgeon.errors import Place, Problem, RuleFileError
from gradsurgeon.review.git_repository import GitError, Repository
from gradsurgeon.schema import Located

_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_NAMES = 10_000  # that are looked at for one like the path that is missing
_MISSING = ("not a tree object", "could not get object info", "bad file")
_LINK = "120000"


@dataclass(frozen=True, slots=True)
class _Entry:
    mode: str
    kind: str  # blob, tree or commit
    hash: str


class GitTree:
    """The files of one commit; an implementation of `schema.Files`.

    Args:
        ref: a branch, a tag, a commit, or whatever else git takes for one.
    """

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self._listed: dict[str, dict[str, _Entry]] = {}

    def open(self, path: str) -> source.Document:
        """Read a file by its path from the top of the repository, or from here after ``./``.

        Raises:
            RuleFileError: the commit has no such file, or it cannot be read, or git cannot be asked.
        """
        spec = f"{self.ref}:{path}"
        try:
            # Git fails here if it fails at all, and says whether the commit or the repository is wrong.
            root = self._root
            whole = self._from_top(path)
            entry = None if whole is None else self._entry(root, whole)
            near = self._nearest(whole) if whole is not None and entry is None else ""
        except GitError as error:
            raise unreadable(spec, str(error), self._remedy(str(error))) from None
        if whole is None:
            raise unreadable(spec, "the path leads out of the repository", "")
        if entry is None:
            raise unreadable(spec, f"`{self.ref}` has no such file", near)
        if wrong := _not_a_file(entry):
            raise unreadable(spec, f"it is {wrong}", "name a file of UTF-8 text")
        return self._document(entry.hash, pathlib.Path(whole), spec)

    def itself(self, document: Located, folder: pathlib.Path) -> packs.Included:
        """Return a document of this tree as an entry of `include` would name it."""
        name = document.file.removeprefix(f"{self.ref}:").rpartition("/")[2]
        return packs.Included(document.file, folder / name, folder)

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        """Return the file that a relative entry names: below ``folder``, in this same commit."""
        packs.check_portable(entry)
        inside = posixpath.normpath(entry)
        if inside == ".." or inside.startswith("../"):
            raise packs.leads_out(entry)
        path = posixpath.normpath(posixpath.join(folder.as_posix(), inside))
        try:
            at_path = self._entry(self._root, path)
            if at_path is None:
                raise packs.is_missing(entry, self._names(posixpath.dirname(path)))
            if at_path.kind == "tree":
                raise packs.is_folder(entry)
        except GitError as error:
            raise packs.IncludeError(f"`{entry[:80]}` cannot be looked up: {error}") from None
        if wrong := _not_a_file(at_path):
            hint = "name the file itself" if at_path.mode == _LINK else "name a file of UTF-8 text"
            raise packs.IncludeError(f"`{entry[:80]}` is {wrong}", hint)
        target = pathlib.Path(path)
        return packs.Included(f"{self.ref}:{path}", target, target.parent)

    def read(self, target: packs.Included) -> source.Document:
        """Read a file that `find` returned."""
        entry = self._entry(self._root, target.path.as_posix())
        assert entry is not None  # noqa: S101 # a commit does not change
        return self._document(entry.hash, target.path, target.name)

    def _document(self, hash_: str, path: pathlib.Path, name: str) -> source.Document:
        try:
            size = int(self._repository.ask("cat-file", "-s", hash_))
            if size > source.MAX_BYTES:
                kib = source.MAX_BYTES // 1024
                raise unreadable(name, f"over {kib} KiB of text", "use `include`")
            raw = self._repository.ask("cat-file", "blob", hash_)
        except GitError as error:
            raise unreadable(name, str(error), self._remedy(str(error))) from None
        return source.read(path, name, raw)

    @cached_property
    def _repository(self) -> Repository:
        return Repository()

    @cached_property
    def _root(self) -> str:
        """The hash of the top folder, asked for once: a branch that moves meanwhile changes nothing."""
        if not self.ref or self.ref.startswith("-") or not self.ref.isprintable():
            raise GitError(f"`{self.ref[:60]}` names no commit")
        # Unlike `rev-parse`, this one names what it could not find.
        self._listed[""] = self._read_folder(f"{self.ref}^{{tree}}")
        return (
            self._repository.ask("rev-parse", "--verify", f"{self.ref}^{{tree}}").decode().strip()
        )

    def _entry(self, root: str, path: str) -> _Entry | None:
        """Return the entry at a path. A link on the way is returned itself, not followed."""
        at = _Entry("040000", "tree", root)
        for step in [part for part in path.split("/") if part not in ("", ".")]:
            if at.mode == _LINK:
                return at
            below = self._list(at.hash) if at.kind == "tree" else {}
            if step not in below:
                return None
            at = below[step]
        return at

    def _list(self, hash_: str) -> dict[str, _Entry]:
        if hash_ not in self._listed:
            self._listed[hash_] = self._read_folder(hash_)
        return self._listed[hash_]

    def _read_folder(self, tree: str) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        listing = self._repository.ask("ls-tree", "-z", "--full-tree", tree)
        for line in filter(None, listing.decode("utf-8", "surrogateescape").split("\0")):
            about, _, name = line.partition("\t")
            mode, kind, hash_ = about.split(" ")
            entries[name] = _Entry(mode, kind, hash_)
        return entries

    def _names(self, folder: str) -> list[str]:
        entry = self._entry(self._root, folder)
        return list(self._list(entry.hash)) if entry is not None and entry.kind == "tree" else []

    def _from_top(self, path: str) -> str | None:
        """Return a path from the top of the repository, ``None`` where it leads out of it."""
        if path.startswith(("./", "../")):
            path = posixpath.join(self._repository.prefix, path)
        whole = posixpath.normpath(path)
        return None if whole == ".." or whole.startswith(("../", "/")) else whole

    def _nearest(self, path: str) -> str:
        """Return a hint with the paths most like the one that is missing."""
        listing = self._repository.ask(
            "ls-tree", "-r", "-z", "--name-only", "--full-tree", self._root
        )
        names = listing.decode("utf-8", "surrogateescape").split("\0")
        known = [name for name in names if name.endswith(_SUFFIXES)][:_MAX_NAMES]
        # The same name in another folder says more than a path of like letters.
        same = [name for name in known if posixpath.basename(name) == posixpath.basename(path)]
        near = same[:3] or get_close_matches(path, known, n=3, cutoff=0.5)
        if not near:
            count = f"{len(known)} files of YAML or JSON" if known else "no file of YAML or JSON"
            return f"paths count from the top of the repository; it has {count}"
        specs = [f"`{self.ref}:{name}`" for name in near]
        return f"did you mean {specs[0]}?" if len(specs) == 1 else f"closest: {', '.join(specs)}"

    def _remedy(self, said: str) -> str:
        if "not a git repository" in said:
            return "run it inside the repository, or name two files"
        if "bare repository" in said:
            return "run it in a working tree, or write the file of the commit to the disk"
        if "borrows objects" in said:
            return "`git repack -a -d` makes them its own; then remove that file"
        if any(word in said for word in _MISSING):
            return (
                "an object is not here, as in a partial clone, and reading fetches nothing: `git show` of "
                "the file does, if you trust the repository"
            )
        if "object name" in said or "names no commit" in said:
            remote, _, branch = self.ref.partition("/")
            fetch = f"`git fetch {remote} {branch}`" if branch else "`git fetch`"
            return (
                f"is it fetched? Try {fetch}; a checkout in CI may need its whole history; a file whose "
                "name holds a colon is written with `./` before it"
            )
        return ""


def unreadable(spec: str, cause: str, hint: str) -> RuleFileError:
    message = f"cannot read the file: {cause}"
    return RuleFileError([Problem(Place(spec, 1, 1), "unreadable-file", message, hint)])


def _not_a_file(entry: _Entry) -> str:
    """Return what an entry is if it is no file; an empty text if it is one."""
    if entry.mode == _LINK:
        return "a symbolic link, or behind one: links of a commit are not followed"
    return {"tree": "a folder", "commit": "a submodule"}.get(entry.kind, "")
