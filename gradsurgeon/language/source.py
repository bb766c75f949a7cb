"""Rule files as text: YAML 1.2 (core schema) read into plain values with places."""

import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import yaml

from gradsurgeon.errors import Place, Problem, RuleFileError, reason_of
from gradsurgeon.language.yaml_hints import hint_for, indicator_hint

Path: TypeAlias = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_BYTES = 1 << 20
_MAX_NODES = 50_000
_MAX_DEPTH = 64

# YAML forbids these characters. U+2028 ends a line for some readers only: text after it in a comment is a
# comment to reviewers and an entry to libyaml. %TAG costs libyaml quadratic time.
_FORBIDDEN = re.compile(
    "\r(?!\n)|[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
    "|(?<![^\n])%TAG"
)
_CORE = re.compile(
    r"(?P<null>|~|null|Null|NULL)|(?P<bool>true|True|TRUE|false|False|FALSE)"
    # More digits would be far beyond any sensible number, and Python refuses to read thousands of them.
    r"|(?P<int>[-+]?[0-9]{1,64})|(?P<oct>0o[0-7]{1,64})|(?P<hex>0x[0-9a-fA-F]{1,64})"
    r"|(?P<float>[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<inf>[-+]?\.(?:inf|Inf|INF))|(?P<nan>\.(?:nan|NaN|NAN))"
)
_BASES = {"int": 10, "oct": 8, "hex": 16}
# The words for keys that are no text.
_KINDS = {bool: "true or false", type(None): "nothing"}


def _mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


class _HaltError(Exception):
    """Reading cannot go on, because of ``args[0]``."""


@dataclass(slots=True)
class _YamlNode:
    data: Any
    start: Any  # marks, whose type depends on the loader
    end: Any
    is_plain: bool = False
    size: int = 1  # values behind aliases count each time
    items: dict[str | int, "_YamlNode"] = field(default_factory=dict)
    keys: dict[str, "_YamlNode"] = field(default_factory=dict)


class Document:
    """A rule file as plain values, with the place of each.

    Attributes:
        file: its name.
        text: its text.
        folder: the folder that it lies in, if it is a file.
        data: the values, ``None`` only if nothing could be read.
        problems: what is wrong with it as YAML.
    """

    def __init__(self, text: str, file: str, folder: pathlib.Path | None = None) -> None:
        self.file = file
        self.text = text.removeprefix("\ufeff")
        self.folder = folder
        self.lines = [line.removesuffix("\r") for line in self.text.split("\n")]
        self.data: object = None
        self._root: _YamlNode | None = None
        reader = _YamlReader(self)
        try:
            self._root = reader.read()
            self.data = self._root.data
        except _HaltError as halt:
            reader.problems.append(halt.args[0])
        self.problems = tuple(reader.problems)

    def place_of(self, start: Any, end: Any = None) -> Place:
        """Return the place from one mark to another."""
        last = len(self.lines) - 1
        if start.line > last:  # libyaml ends a file without a line feed on a line of its own
            start = _mark_at(last, len(self.lines[last]))
            end = start
        if end is None:
            end = start
        line = self.lines[start.line]
        end_column = len(line)
        if end.line == start.line:
            end_column = end.column
        width = max(1, end_column - start.column)
        return Place(self.file, start.line + 1, start.column + 1, line, width)

    def place(self, path: Path) -> Place:
        node = self._find(path)
        if node is None:
            return self.place_of(_mark_at(0, 0))
        return self.place_of(node.start, node.end)

    def key_place(self, path: Path) -> Place:
        parent = self._find(path[:-1])
        if path and parent is not None and path[-1] in parent.keys:
            key = parent.keys[str(path[-1])]
            return self.place_of(key.start, key.end)
        return self.place(path)

    def missing_place(self, path: Path) -> Place:
        """Return the place of the first key, for a key that is missing beside it."""
        node = self._find(path)
        if node is None or not node.keys:
            return self.place(path)
        return self.key_place((*path, next(iter(node.keys))))

    def _find(self, path: Path) -> _YamlNode | None:
        node = self._root
        for element in path:
            if node is not None:
                node = node.items.get(element, node)
        return node


def read(path: str | os.PathLike[str], name: str = "", raw: bytes | None = None) -> Document:
    """Read a rule file. Messages use ``name`` or its path; ``raw`` is the content, if known."""
    file = os.fspath(path)
    if not name:
        name = file
    try:
        if raw is None:  # bounded, so a device or a file of gigabytes is refused
            with pathlib.Path(file).open("rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
        if len(raw) <= MAX_BYTES:
            return Document(raw.decode("utf-8-sig"), name, pathlib.Path(file).parent)
        cause = f"over {MAX_BYTES // 1024} KiB of text"
    except UnicodeDecodeError as error:
        cause = f"byte {error.start + 1} is not UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path itself
        cause = reason_of(error)
    message = f"cannot read the file: {cause}"
    hint = "name a readable file of UTF-8 text"
    raise RuleFileError([Problem(Place(name, 1, 1), "unreadable-file", message, hint)])


def parse(text: str, file: str = "<text>") -> Document:
    return Document(text, file)


class _YamlReader:
    def __init__(self, source: Document) -> None:
        self._source = source
        self.problems: list[Problem] = []
        self._anchors: dict[str, _YamlNode] = {}
        self._long_quote: Any = None  # the newest quoted text over several lines
        self._events: Any = yaml.parse(source.text, Loader=_LOADER)

    def _halt(self, check: str, message: str, hint: str, mark: Any) -> NoReturn:
        raise _HaltError(Problem(self._source.place_of(mark), check, message, hint))

    def _note(self, check: str, message: str, hint: str, node: _YamlNode) -> None:
        place = self._source.place_of(node.start, node.end)
        self.problems.append(Problem(place, check, message, hint))

    def _check_text(self) -> None:
        text = self._source.text
        if len(text) > MAX_BYTES:
            message = f"over {MAX_BYTES // 1024} KiB of text"
            self._halt("too-large", message, "use `include`", _mark_at(0, 0))
        forbidden = _FORBIDDEN.search(text)
        if forbidden is not None:
            *before, begin = text[: forbidden.start()].split("\n")
            mark = _mark_at(len(before), len(begin))
            message = f"YAML syntax: {forbidden[0]!a} is not allowed"
            hint = "remove it; characters can be written as escapes in double quotes"
            self._halt("yaml-syntax", message, hint, mark)

    def read(self) -> _YamlNode:
        self._check_text()
        root: _YamlNode | None = None
        try:
            for event in self._events:
                if root is not None and isinstance(event, yaml.DocumentStartEvent):
                    second = _YamlNode(None, event.start_mark, event.end_mark)
                    hint = "a rule file has one document"
                    self._note("several-documents", "a second document", hint, second)
                    break
                if isinstance(event, yaml.NodeEvent):
                    root = self._node(event, 0)
        except yaml.MarkedYAMLError as error:
            self._halt_at(error)
        if root is None or root.data is None:
            hint = "a rule file has `version: 1` and a list of `rules`"
            self._halt("empty-file", "the file holds no rules", hint, _mark_at(0, 0))
        return root

    def _halt_at(self, error: yaml.MarkedYAMLError) -> NoReturn:
        mark: Any = error.problem_mark
        context = error.context or ""
        problem = error.problem or ""
        parts = [part for part in (context, problem) if part]
        message = f"YAML syntax: {', '.join(parts)}"
        is_quoted = "quoted" in context and "escape" not in problem
        is_in_token = "scanning" in context and "tab" not in problem
        if is_in_token and error.context_mark is not None:
            # A token that does not end is noticed late.
            mark = error.context_mark
        quote = self._long_quote
        if quote is not None and quote.end_mark.line == mark.line:
            is_quoted = True
            mark = quote.start_mark
        lines = self._source.lines
        hint = hint_for(error, lines[min(mark.line, len(lines) - 1)])
        if is_quoted:
            hint = f"close the quote that opens on line {mark.line + 1}"
        self._halt("yaml-syntax", message, hint, mark)

    def _node(self, event: Any, depth: int) -> _YamlNode:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(event, depth)
        else:
            node = self._sequence(event, depth)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:80]
            start = _YamlNode(None, event.start_mark, event.end_mark)
            message = f"the YAML tag {tag} is not allowed"
            self._note("yaml-tag", message, indicator_hint("!"), start)
        # An alias inside of its own anchor has none yet.
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: Any) -> _YamlNode:
        name = event.anchor
        if name in self._anchors:
            return self._anchors[name]
        node = _YamlNode(f"*{name}", event.start_mark, event.end_mark)
        message = f"YAML syntax: there is no anchor &{name[:80]}"
        self._note("yaml-syntax", message, indicator_hint("*"), node)
        return node

    def _scalar(self, event: Any) -> _YamlNode:
        text = event.value
        is_plain = not event.style and event.tag is None
        data: Any = text
        if is_plain:
            data = _core_value(text)
        elif not text and event.tag is not None:
            # `!bias` is a tag without a value. Its text as the value avoids a second problem.
            data = event.tag
        if event.style in ("'", '"') and event.start_mark.line < event.end_mark.line:
            self._long_quote = event
        size = 1 + len(text) // 64  # an alias may repeat a long text
        return _YamlNode(data, event.start_mark, event.end_mark, is_plain, size=size)

    def _sequence(self, event: Any, depth: int) -> _YamlNode:
        node = _YamlNode([], event.start_mark, event.end_mark)
        for child in self._children(node, depth):
            node.items[len(node.data)] = child
            node.data.append(child.data)
        return node

    def _mapping(self, event: Any, depth: int) -> _YamlNode:
        node = _YamlNode({}, event.start_mark, event.end_mark)
        children = self._children(node, depth)
        for key in children:
            value = next(children)
            if self._is_key(key, node):
                node.keys[key.data] = key
                node.items[key.data] = value
                node.data[key.data] = value.data
        return node

    def _children(self, node: _YamlNode, depth: int) -> Iterator[_YamlNode]:
        if depth == _MAX_DEPTH:
            self._halt("too-large", f"over {_MAX_DEPTH} levels of nesting", "", node.start)
        for event in self._events:
            if isinstance(event, yaml.CollectionEndEvent):
                node.end = event.end_mark
                return
            child = self._node(event, depth + 1)
            node.size += child.size
            if node.size > _MAX_NODES:
                self._halt("too-large", f"over {_MAX_NODES} values", "", node.start)
            yield child

    def _is_key(self, key: _YamlNode, parent: _YamlNode) -> bool:
        name = key.data
        if key.is_plain and name == "<<":
            self._note("merge-key", "the merge key << is not allowed", "write the keys out", key)
        elif not isinstance(name, str):
            kind = _KINDS.get(type(name), "a number")
            self._note("key-type", f"keys must be text, this one is {kind}", "quote the key", key)
        elif name in parent.keys:
            line = parent.keys[name].start.line + 1
            message = f"duplicate key `{name[:80]}` (first on line {line})"
            self._note("duplicate-key", message, "remove one of the two", key)
        else:
            return True
        return False


# Most texts are the keys of rules, which come again and again.
@lru_cache(maxsize=1024)
def _core_value(text: str) -> str | float | bool | None:
    match = _CORE.fullmatch(text)
    if match is None:
        return text
    kind = match.lastgroup
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind in _BASES:
        return int(text, _BASES[kind])
    if kind == "float":
        return float(text)
    return float(text.replace(".", ""))  # `.inf` or `.nan`
