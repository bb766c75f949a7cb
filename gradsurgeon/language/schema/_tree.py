"""Document -> RuleSet, with the rules of everything that the document includes."""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from gradsurgeon.actions import Rule, described
from gradsurgeon.errors import Place, Problem, RuleFileError
from gradsurgeon.language import packs, source
from gradsurgeon.language.schema._document import (
    MAX_PROBLEMS,
    Built,
    Located,
    bounded,
    duplicate_id,
    no_mapping,
    refusal,
    rule_at,
    tidy,
    top_level,
)

# A limit for the whole tree, so a hostile tree is read within seconds.
MAX_FILES = 32


# Returns the file of a relative entry in a file in a folder, on disk or in a commit of git, or raises `IncludeError`.
Find: TypeAlias = Callable[[str, pathlib.Path], packs.Included]


@dataclass(frozen=True)
class RuleSet:
    """Validated rules in order: the rules of included files first, then the rules of the file itself.

    Attributes:
        rules: the rules.
        file: name of the file that was loaded.
        text: its text, empty for rules from Python.
        files: name and text of that file and of every included file and pack.
    """

    rules: tuple[Rule, ...]
    file: str = "<python>"
    text: str = ""
    files: tuple[tuple[str, str], ...] = ()
    # The file of each rule by id, and the index of the rule there.
    _written: Mapping[str, tuple[Located, int]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # The entry of `include` for each included file by name.
    _entries: Mapping[str, Place] = field(default_factory=dict, repr=False, compare=False)

    def place(self, rule_id: str, *path: str | int) -> Place:
        """Return the place of a rule, or of an option of it, such as ``"expect", "params"``."""
        if rule_id not in self._written:
            return Place(self.file, 0, 0)
        source, index = self._written[rule_id]
        if not path:
            path = ("id",)
        return source.place(("rules", index, *path))

    def place_to_correct(self, rule_id: str, *path: str | int) -> Place:
        """Return the place of an option. For a pack, which users cannot change, it is the `include`."""
        place = self.place(rule_id, *path)
        while place.file.startswith(packs.PREFIX) and place.file in self._entries:
            place = self._entries[place.file]
        return place

    @property
    def sha256(self) -> str:
        """Hash of all texts, or of rules from Python, and of the files that rules name."""
        texts = [text for _, text in self.files]
        if not texts:
            texts = [rule.model_dump_json() for rule in self.rules]
        texts += [rule.file_sha256 for rule in self.rules if rule.file_sha256]
        return _sha256("\n".join(texts))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def from_rules(rules: Sequence[Rule]) -> RuleSet:
    source = Built(None, file="<python>")
    problems = []
    written: dict[str, tuple[Located, int]] = {}
    for index, rule in enumerate(rules):
        problems += _note_id(written, rule.id, source, index)
    if not rules:
        problems.append(Problem(source.place(()), "no-rules", "there are no rules"))
    if problems:
        raise RuleFileError(problems)
    return RuleSet(tuple(rules), _written=written)


def _note_id(
    written: dict[str, tuple[Located, int]], rule_id: object, source: Located, index: int
) -> list[Problem]:
    """Note where a rule is written, and return the problem if another one has its id."""
    if not isinstance(rule_id, str):
        return []
    first, first_index = written.setdefault(rule_id, (source, index))
    if (first, first_index) == (source, index):
        return []
    place = source.place(("rules", index, "id"))
    return [duplicate_id(rule_id, place, first.place(("rules", first_index, "id")))]


def validate(source: Located, find: Find = packs.file_on_disk) -> RuleSet:
    inspection = Inspection(source, find)
    if inspection.rules is None:
        raise RuleFileError(inspection.problems)
    return inspection.rules


class Inspection:
    """A rule file with its includes.

    Attributes:
        rules: all rules; ``None`` if there are problems.
        problems: the problems, file by file.
        sources: the files in the same order, packs too.
    """

    def __init__(self, source: Located, find: Find = packs.file_on_disk) -> None:
        self._find = find
        self.sources: list[Located] = []
        self._rules: list[Rule] = []
        self._entries: dict[str, Place] = {}
        self._written: dict[str, tuple[Located, int]] = {}
        self._problems: list[list[Problem]] = []  # one list per file
        self._followed = 0  # entries
        self._reached: dict[pathlib.Path, Place] = {}  # by which entry
        if source.folder is not None:
            # The path is relative in a commit of git, and absolute on disk.
            own = source.folder / re.split("[/:]", source.file)[-1]
            self._reached = dict.fromkeys((own, own.resolve()), source.place(()))
        self._add_file(source, source.folder)
        # The problems of a file come before the problems of its included files.
        self.problems = bounded(list(chain.from_iterable(self._problems)))
        self.rules: RuleSet | None = None
        if not self.problems:
            files_read = [(each.file, each.text) for each in self.sources if each.text]
            rules = tuple(self._rules)
            self.rules = RuleSet(
                rules, source.file, source.text, tuple(files_read), self._written, self._entries
            )

    def _add_file(self, source: Located, folder: pathlib.Path | None) -> None:
        problems_of_file: list[Problem] = []
        self._problems.append(problems_of_file)
        self.sources.append(source)
        data = source.data
        if not isinstance(data, dict):
            problems_of_file += no_mapping(source)
            return
        # In a file for another version the same words may have other meanings, so the rest is not checked.
        refused = refusal(source, data)
        if refused is not None:
            problems_of_file.append(refused)
            return
        problems = [*source.problems, *top_level(source, data)]
        for index, entry in enumerate(_items(data, "include")):
            place = source.place(("include", index))
            if isinstance(entry, str):
                problems += self._follow(entry, place, folder)
            else:
                message = f"expected a pack or the path of a file, found {described(entry)}"
                hint = f'such as "{packs.PREFIX}nan-trap@1"'
                problems.append(Problem(place, "wrong-type", message, hint))
        problems += self._add_rules(source, _items(data, "rules"), folder)
        problems_of_file += tidy(problems)

    def _add_rules(
        self, source: Located, entries: Sequence[object], folder: pathlib.Path | None
    ) -> Iterator[Problem]:
        flaw_count = 0
        for index, entry in enumerate(entries):
            if flaw_count > MAX_PROBLEMS:
                message = f"over {MAX_PROBLEMS} problems: the rules from here on are not checked"
                yield Problem(source.place(("rules", index)), "too-large", message)
                break
            rule, flaws = rule_at(source, index, entry)
            flaw_count += len(flaws)
            yield from flaws
            # Rules of a commit of git are compared, and never applied.
            if rule is not None and self._find is packs.file_on_disk:
                yield from _read_file(rule, source.place(("rules", index, "file")), folder)
            if rule is not None:
                self._rules.append(rule)
            if isinstance(entry, dict):
                yield from _note_id(self._written, entry.get("id"), source, index)

    def _follow(self, entry: str, place: Place, folder: pathlib.Path | None) -> Iterator[Problem]:
        # Entries without a file count too, because their hints take time.
        self._followed += 1
        if self._followed > MAX_FILES:
            if self._followed == MAX_FILES + 1:  # one message is enough
                message = f"more than {MAX_FILES} entries in all"
                yield Problem(place, "bad-include", message, "include fewer files")
            return
        try:
            target = packs.locate(entry, folder, self._find)
            first = self._reached.setdefault(target.path, place)
            if first is not place:  # a circle, too
                message = f"{target.name} is included twice, first at {first}"
                yield Problem(place, "bad-include", message, "remove one of the two entries")
                return
            document = target.read()
        except packs.IncludeError as error:
            yield Problem(place, "bad-include", error.message, error.hint)
        except RuleFileError as error:
            (problem,) = error.problems
            yield Problem(place, "bad-include", f"`{entry[:80]}`: {problem.message}", problem.hint)
        else:
            self._entries[document.file] = place
            self._add_file(document, target.folder)


def _read_file(rule: Rule, place: Place, folder: pathlib.Path | None) -> Iterator[Problem]:
    try:
        rule.read_file(lambda entry: packs.locate(entry, folder, packs.file_on_disk).path)
    except packs.IncludeError as error:
        yield Problem(place, "bad-include", error.message, error.hint)
    except (OSError, ValueError):
        message = "this is no safetensors file, or one that is cut off"
        yield Problem(
            place, "bad-include", message, "write it again by `safetensors.torch.save_file`"
        )


def _items(data: Mapping[str, object], key: str) -> Sequence[object]:
    """Return the list under a key. `top_level` reports a value that is no list."""
    items = data.get(key)
    if isinstance(items, list | tuple):
        return items
    return ()


def pack(name: str) -> source.Document:
    """Read a pack by its name, such as ``gradsurgeon:debug@1``, or raise `RuleFileError`."""
    try:
        return packs.rule_file(name).read()
    except packs.IncludeError as error:
        problem = Problem(Place(name, 1, 1), "unreadable-file", error.message, error.hint)
        raise RuleFileError([problem]) from None
