"""What an entry of `include` names: a pack that comes with gradsurgeon, or a file of the reader's own.

Packs live in one folder with a lock, ``packs.json``, which gives each published version its file and
the hash of its content: a rule file that was reviewed with a pack keeps its meaning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path, PureWindowsPath

from gradsurgeon.errors import HintedError, did_you_mean

PREFIX = "gradsurgeon:"

_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_LISTED = 100  # files of a folder that are looked at for a name like the one that is missing


class IncludeError(HintedError):
    """An entry that names nothing that can be included."""


@dataclass(frozen=True, slots=True)
class Included:
    """A file to be included.

    Attributes:
        name: what messages call it.
        path: where it is, without symbolic links, so that one file has one path.
        folder: what its own relative entries start from; ``None`` where it may have none.
        sha256: hash that the content must have; empty where any will do.
    """

    name: str
    path: Path
    folder: Path | None
    sha256: str = ""

    def check(self, text: str) -> None:
        """Raise `IncludeError` if ``text`` is not what was published."""
        if self.sha256 not in ("", content_hash(text)):
            raise IncludeError(
                f"{self.name} is not what was published: {self.path.name} has been changed",
                "restore it; to change a pack, copy it to your rules and include that file",
            )


def content_hash(text: str) -> str:
    """Return the hash of a text that the lock holds: git may have rewritten the ends of lines."""
    return hashlib.sha256(text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")).hexdigest()


def folder() -> Path:
    """Return the folder of the packs: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "rules"
    return inside if inside.is_dir() else package.parent / "rules"


def published() -> dict[str, Included]:
    """Return every published pack by `NAME@N`.

    Raises:
        IncludeError: the installation is damaged.
    """
    return _published(folder())


@cache
def _published(where: Path) -> dict[str, Included]:
    try:
        lock = json.loads((where / "packs.json").read_text(encoding="utf-8"))
        return {
            spec: Included(f"{PREFIX}{spec}", where / entry["file"], None, entry["sha256"])
            for spec, entry in lock["packs"].items()
        }
    except (OSError, ValueError, KeyError) as error:
        message = f"the list of packs cannot be read: {_cause(error)}"
        raise IncludeError(message, "install gradsurgeon again") from None


def locate(
    entry: str, base: Path | None, find: Callable[[str, Path], Included] | None = None
) -> Included:
    """Return what an entry of `include` names.

    Args:
        entry: ``gradsurgeon:NAME@N`` or a path.
        base: the folder of the including file; ``None`` where that is no file of the reader's own.
        find: looks up a path, given with the folder; on the disk if not given.

    Raises:
        IncludeError: it names nothing, or something that must not be read.
    """
    if entry.casefold().startswith(PREFIX):
        return _pack(entry[len(PREFIX) :])
    if base is None:
        raise _not_from_here(entry)
    return (find or file_on_disk)(entry, base)


def _pack(spec: str) -> Included:
    known = published()
    if spec in known:
        return known[spec]
    name, _, version = spec.partition("@")
    versions = _versions()
    if not name:
        example = f"write it as {PREFIX}NAME@N; known: {', '.join(_newest_of_all())}"
        raise IncludeError("the entry names no pack", example)
    if name not in versions:
        near = did_you_mean(name, versions).split("`")[1:2]
        hint = f"did you mean `{_newest(near[0], versions)}`?" if near else ""
        hint = hint or f"known: {', '.join(_newest_of_all())}"
        raise IncludeError(f"there is no pack `{name[:60]}`", hint)
    if not version:
        raise IncludeError(
            f"`{PREFIX}{name}` names no version, so that an update of gradsurgeon could change what "
            "a reviewed file means",
            f"write `{_newest(name, versions)}`",
        )
    listed = ", ".join(f"`{PREFIX}{name}@{one}`" for one in versions[name])
    if not re.fullmatch("[0-9]+", version):
        message = f"`{version[:60]}` is no version of a pack: versions are whole numbers"
        raise IncludeError(message, f"known: {listed}")
    message = f"the pack `{name}` has no version {version[:60]} in this gradsurgeon"
    raise IncludeError(message, f"known: {listed}")


def _versions() -> dict[str, list[str]]:
    """Return the versions of each pack, oldest first."""
    by_name: dict[str, list[str]] = {}
    for spec in published():
        name, _, version = spec.partition("@")
        by_name.setdefault(name, []).append(version)
    return {name: sorted(versions, key=int) for name, versions in sorted(by_name.items())}


def _newest(name: str, versions: dict[str, list[str]]) -> str:
    return f"{PREFIX}{name}@{versions[name][-1]}"


def _not_from_here(entry: str) -> IncludeError:
    """Return why a relative path means nothing where the rules are no file of the reader's own."""
    if hint := _like_a_pack(entry):
        return IncludeError(f"`{entry[:80]}` is no pack", hint)
    return IncludeError(
        f"`{entry[:80]}` would be relative to the including file, and there is none: these rules are "
        "a text, a dict or a pack",
        f"load them from a file, or include packs only, such as `{_newest_of_all()[0]}`",
    )


def file_on_disk(entry: str, base: Path) -> Included:
    """Return the file that an entry names, which has to lie in the folder ``base`` or below."""
    check_portable(entry)
    named = base / entry
    try:
        root, path = base.resolve(), named.resolve()
        inside, regular = path.is_relative_to(root), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, links in a circle
        # What Python says of links names absolute paths.
        circle = "its symbolic links go round in a circle"
        cause = circle if isinstance(error, RuntimeError) else _cause(error)
        raise IncludeError(f"`{entry[:80]}` cannot be looked up: {cause}") from None
    if not inside:
        raise leads_out(entry, "" if ".." in Path(entry).parts else " through a symbolic link")
    if ".git" in path.relative_to(root).parts:
        raise IncludeError(
            f"`{entry[:80]}` lies in `.git`, of which nothing is under review",
            "put the file beside the including file",
        )
    if not regular:
        raise _no_file(entry, path)
    return Included(str(named), path, named.parent)


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def leads_out(entry: str, how: str = "") -> IncludeError:
    """Return the error that an entry names something outside the folder of the including file."""
    return IncludeError(
        f"`{entry[:80]}` leads out of the folder of the including file{how}",
        "a rule file reads inside its own folder only: put the file there",
    )


def check_portable(entry: str) -> None:
    """Raise `IncludeError` if an entry cannot be a path that means the same to every reader."""
    if not entry.strip():
        raise IncludeError("an entry is empty", f"name a file, or a pack as {PREFIX}NAME@N")
    if "://" in entry:
        raise IncludeError(f"`{entry[:80]}` is an address: nothing is fetched", "copy the file")
    if entry.startswith(("/", "\\")) or PureWindowsPath(entry).drive:
        raise IncludeError(
            f"`{entry[:80]}` is absolute: a rule file reads inside its own folder only",
            "write the path relative to the including file",
        )
    if "\\" in entry:
        raise IncludeError(f"`{entry[:80]}` holds a backslash", "write paths with `/`")


def _no_file(entry: str, path: Path) -> IncludeError:
    """Return why a path, which lies inside the tree, is not a file that can be read."""
    if path.is_dir():
        return is_folder(entry, _names(path))
    if path.exists():
        return IncludeError(f"`{entry[:80]}` is no regular file", "name a file of UTF-8 text")
    return is_missing(entry, _names(path.parent))


def is_folder(entry: str, inside: Iterable[str]) -> IncludeError:
    """Return the error that an entry names a folder, which holds the files ``inside``."""
    names = sorted(one for one in inside if one.endswith(_SUFFIXES))
    hint = f"name its files, such as `{entry.rstrip('/')}/{names[0]}`" if names else ""
    return IncludeError(f"`{entry[:80]}` is a folder", hint)


def is_missing(entry: str, beside: Iterable[str]) -> IncludeError:
    """Return the error that an entry names nothing; ``beside``: what stands in its folder."""
    hint = _like_a_pack(entry)
    if not hint and "*" in entry:
        hint = "patterns are not expanded here: name each file"
    if not hint:
        # Without the suffixes: that both are YAML makes no two names alike.
        stems = {Path(name).stem: name for name in sorted(beside)}
        near = did_you_mean(Path(entry).stem, stems).split("`")[1:2]
        parent = entry.rpartition("/")[0]
        hint = f"did you mean `{parent}{'/' * bool(parent)}{stems[near[0]]}`?" if near else ""
    return IncludeError(
        f"there is no file `{entry[:80]}` in the folder of the including file", hint
    )


def _names(where: Path) -> Iterator[str]:
    if where.is_dir():
        yield from (one.name for one in islice(where.iterdir(), _MAX_LISTED))


def _like_a_pack(entry: str) -> str:
    """Return a hint where a pack was meant, such as ``nan-trap`` or ``gradsurgoen:nan-trap@1``."""
    name, _, rest = entry.rpartition(":")[2].partition("@")
    packs = [one for one in _newest_of_all() if one.removeprefix(PREFIX).partition("@")[0] == name]
    return f"did you mean `{packs[0]}`?" if packs and not rest.endswith(_SUFFIXES) else ""


def _newest_of_all() -> list[str]:
    versions = _versions()
    return [_newest(name, versions) for name in versions]
