"""The target of an entry of `include`: a pack of gradsurgeon, or a file of the user."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from gradsurgeon.errors import HintedError, did_you_mean, reason_of
from gradsurgeon.language import source
from gradsurgeon.language.source import Document

PREFIX = "gradsurgeon:"


class IncludeError(HintedError):
    """An entry that names no file to include."""


@dataclass(frozen=True, slots=True)
class Included:
    name: str  # in messages
    path: Path  # without symbolic links, so one file has one path
    folder: Path | None  # base of its own relative entries; ``None`` if it may have none
    sha256: str = ""  # the required hash of the content; empty for any content

    def read(self) -> Document:
        """Return the content, or raise `RuleFileError` or `IncludeError`."""
        document = source.read(self.path, self.name)
        if self.sha256 not in ("", content_hash(document.text)):
            raise IncludeError(
                f"{self.name} differs from the published version: {self.path.name} was changed",
                "restore it; to change a pack, copy it to your rules and include that file",
            )
        return document


def content_hash(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")).hexdigest()


def folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "rules"
    if installed.is_dir():
        return installed
    return package.parent / "rules"


def published() -> dict[str, Included]:
    """Return every published pack by `NAME@N`, or raise `IncludeError` if the installation is damaged."""
    where = folder()
    packs = {}
    try:
        lock = json.loads((where / "packs.json").read_text(encoding="utf-8"))
        for spec, entry in lock["packs"].items():
            file = where / entry["file"]
            packs[spec] = Included(f"{PREFIX}{spec}", file, None, entry["sha256"])
    except (OSError, ValueError, KeyError) as error:
        message = f"the list of packs cannot be read: {reason_of(error)}"
        raise IncludeError(message, "install gradsurgeon again") from None
    return packs


def rule_file(spec: str) -> Included:
    known = published()
    name = spec[len(PREFIX) :]
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    if not hint:
        hint = f"known: {', '.join(PREFIX + pack for pack in known)}"
    raise IncludeError(
        f"there is no pack `{name[:60]}`; packs are named with their version, NAME@N, because an update "
        "of gradsurgeon must not change what a reviewed file means",
        hint,
    )


def locate(entry: str, base: Path | None, find: Callable[[str, Path], Included]) -> Included:
    if entry.casefold().startswith(PREFIX):
        return rule_file(entry)
    if base is None:
        raise IncludeError(
            f"`{entry[:80]}` would be relative to the rule file, and there is none: these rules "
            "are a text, a dict or a pack",
            f"load them from a file, or include packs, such as {PREFIX}nan-trap@1",
        )
    return find(entry, base)


def file_on_disk(entry: str, base: Path) -> Included:
    """Return the file of an entry, which must be in the folder ``base`` or below."""
    path = inside(entry, base)
    if not path.is_file():
        message = f"there is no file `{entry[:80]}` in the folder of the rule file"
        raise IncludeError(message, f"correct the path; packs are written {PREFIX}NAME@N")
    named = base / entry
    return Included(str(named), path, named.parent)


def inside(entry: str, base: Path) -> Path:
    """Return the path of a file or a folder in the folder ``base`` or below, without symbolic links."""
    check_portable(entry)
    try:
        root = base.resolve()
        path = (base / entry).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        # The message of Python would show absolute paths.
        hint = "name a file in the folder of the rule file"
        raise IncludeError(f"`{entry[:80]}` cannot be looked up", hint) from None
    if not path.is_relative_to(root):
        raise leads_out(entry)
    # Actions of a job write tokens there, and a message would quote them.
    if ".git" in path.relative_to(root).parts:
        raise IncludeError(f"`{entry[:80]}` is in `.git`", "put the file beside the rule file")
    return path


def leads_out(entry: str) -> IncludeError:
    return IncludeError(
        f"`{entry[:80]}` leads out of the folder of the rule file, by `..` or by a link",
        "a rule file reads inside its own folder only: put the file there",
    )


def check_portable(entry: str) -> None:
    """Raise `IncludeError` unless an entry is the same path on every system."""
    if entry.startswith("/") or "\\" in entry or PureWindowsPath(entry).drive:
        raise IncludeError(
            f"`{entry[:80]}` is absolute, or holds a backslash: a rule file reads inside its own folder "
            "only, in the same way everywhere",
            "write the path relative to the rule file, with `/`",
        )
