"""Rule files as text: YAML 1.2 (core schema) read into plain values with places."""

import os
import pathlib
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import yaml

from gradsurgeon.errors import Place, Problem, RuleFileError, cause_of
from gradsurgeon.language.yaml_hints import hint_for, indicator_hint, text_of

Path: TypeAlias = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Without libyaml PyYAML is 30 times slower, and must still refuse hostile text within a second.
MAX_BYTES = 1 << 20
_MAX_BYTES_PURE = 1 << 16
_MAX_NODES = 100_000
_MAX_DEPTH = 64
_MAX_PROBLEMS = 200
_MAX_INT = 64  # digits: far beyond any sensible bound, far below where Python raises

# YAML forbids these characters. U+2028 ends a line for some readers only: text after it in a comment is a
# comment to reviewers and an entry to libyaml. %TAG costs libyaml quadratic time.
_FORBIDDEN = re.compile(
    "\r(?!\n)|[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
    "|(?<![^\n])%TAG"
)
_CORE = re.compile(
    r"(?P<null>|~|null|Null|NULL)|(?P<bool>true|True|TRUE|false|False|FALSE)"
    r"|(?P<int>[-+]?[0-9]+)|(?P<oct>0o[0-7]+)|(?P<hex>0x[0-9a-fA-F]+)"
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
class _Node:
    data: Any
    start: Any  # marks, whose type depends on the loader
    end: Any
    plain: bool = False
    size: int = 1


@dataclass(slots=True)
class _Collection(_Node):
    """A mapping or a sequence. ``key`` waits for its value."""

    flow: bool | None = False
    items: dict[str | int, _Node] = field(default_factory=dict)
    keys: dict[str, _Node] = field(default_factory=dict)
    key: _Node | None = None
    open: bool = True


class _Text:
    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text.removeprefix("\ufeff")
        self.lines = [line.removesuffix("\r") for line in self.text[:MAX_BYTES].split("\n")]

    def place(self, start: Any, end: Any = None) -> Place:
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


@dataclass(frozen=True)
class Document:
    """A rule file as plain values, ``None`` only if nothing could be read, with the place of each."""

    file: str
    text: str = field(repr=False)
    data: object
    problems: tuple[Problem, ...]
    _source: _Text = field(repr=False, compare=False)
    _root: _Node | None = field(repr=False, compare=False)
    folder: pathlib.Path | None = None

    def place(self, path: Path) -> Place:
        node = self._find(path)
        if isinstance(node, _Collection) and node.flow:
            return self._source.place(node.start, node.end)
        return self.missing_place(path)

    def key_place(self, path: Path) -> Place:
        parent = self._find(path[:-1])
        if path and isinstance(parent, _Collection):
            key = parent.keys.get(str(path[-1]))
            if key is not None:
                return self._source.place(key.start, key.end)
        return self.place(path)

    def missing_place(self, path: Path) -> Place:
        """Return the place of the first key, for a key that is missing beside it."""
        node = self._find(path)
        if node is None:
            return self._source.place(_mark_at(0, 0))
        first: _Node | None = node
        if isinstance(node, _Collection):
            first = next(iter(node.keys.values()), None)
        if first is None:
            return self._source.place(node.start)
        return self._source.place(first.start, first.end)

    def _find(self, path: Path) -> _Node | None:
        node = self._root
        for element in path:
            if isinstance(node, _Collection) and element in node.items:
                node = node.items[element]
        return node


def read(path: str | os.PathLike[str], name: str = "", raw: bytes | None = None) -> Document:
    """Read a rule file. Messages use ``name`` or its path; ``raw`` is the content, if known."""
    file = os.fspath(path)
    if not name:
        name = file
    try:
        if raw is None:  # bounded, so a device or a file of gigabytes is refused like any long text
            with pathlib.Path(file).open("rb") as stream:
                raw = stream.read(MAX_BYTES + 4)
        if b"\0" not in raw:
            errors = "strict"
            if len(raw) > MAX_BYTES + 3:
                errors = (
                    "replace"  # the cut may be inside a character, and the text is too long anyway
                )
            document = parse(raw.decode("utf-8-sig", errors), name)
            return replace(document, folder=pathlib.Path(file).parent)
        cause = "it holds NUL bytes, so it is binary or UTF-16"
    except UnicodeDecodeError as error:
        cause = f"byte {error.start + 1} is not UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path itself
        cause = cause_of(error)
    message = f"cannot read the file: {cause}"
    hint = "name a readable file of UTF-8 text"
    raise RuleFileError([Problem(Place(name, 1, 1), "unreadable-file", message, hint)])


def parse(text: str, file: str = "<text>") -> Document:
    source = _Text(file, text)
    reader = _YamlReader(source)
    root = None
    data = None
    try:
        reader.check_text()
        root = reader.walk()
        data = root.data
    except _HaltError as halt:
        reader.problems.append(halt.args[0])
    return Document(file, text, data, tuple(reader.problems), source, root)


class _YamlReader:
    def __init__(self, source: _Text) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.root: _Node | None = None
        self.stack: list[_Collection] = []
        self.anchors: dict[str, _Node] = {}
        self.quoted: Any = None  # the newest event of a text in quotes

    def halt(self, check: str, message: str, hint: str, mark: Any = None) -> NoReturn:
        if mark is None:
            mark = _mark_at(0, 0)
        raise _HaltError(Problem(self.source.place(mark), check, message, hint))

    def note(self, check: str, message: str, hint: str, node: _Node) -> None:
        if len(self.problems) == _MAX_PROBLEMS:
            rest = f"over {_MAX_PROBLEMS} problems: the rest is not read"
            self.halt("too-large", rest, "", node.start)
        place = self.source.place(node.start, node.end)
        self.problems.append(Problem(place, check, message, hint))

    def check_text(self) -> None:
        text = self.source.text
        limit = MAX_BYTES
        hint = "use `include`"
        if _LOADER is yaml.SafeLoader:
            limit = _MAX_BYTES_PURE
            hint += "; PyYAML with libyaml reads files of 1 MiB"
        if len(text.encode("utf-8", "surrogatepass")) > limit:
            self.halt("too-large", f"over {limit // 1024} KiB of text", hint)
        forbidden = _FORBIDDEN.search(text)
        if forbidden is not None:
            start = forbidden.start()
            line = text.count("\n", 0, start)
            line_start = text.rfind("\n", 0, start) + 1
            mark = _mark_at(line, start - line_start)
            message = f"YAML syntax: {forbidden[0]!a} is not allowed"
            hint = "remove it; characters can be written as escapes in double quotes"
            self.halt("yaml-syntax", message, hint, mark)

    def refuse_depth(self, mark: Any) -> NoReturn:
        self.halt("too-large", f"over {_MAX_DEPTH} levels of nesting", "", mark)

    def walk(self) -> _Node:
        events: Any = yaml.parse(self.source.text, Loader=_LOADER)
        try:
            for count, event in enumerate(events):
                if count > _MAX_NODES:
                    self.halt("too-large", f"more than {_MAX_NODES} values", "", event.start_mark)
                if self.root and isinstance(event, yaml.DocumentStartEvent):
                    second = _Node(None, event.start_mark, event.end_mark)
                    hint = "a rule file has one document"
                    self.note("several-documents", "a second document", hint, second)
                    break
                self.read_event(event)
        except yaml.MarkedYAMLError as error:
            # libyaml 0.2.6 refuses 1,000 levels by itself, before it hands out the first of them.
            if "maximum nesting depth" in text_of(error.problem):
                self.refuse_depth(error.problem_mark)
            self.halt_at(error)
        if self.root is None or self.root.data is None:
            hint = "a rule file has `version: 1` and a list of `rules`"
            self.halt("empty-file", "the file holds no rules", hint)
        return self.root

    def halt_at(self, error: yaml.MarkedYAMLError) -> NoReturn:
        parts = [part for part in (error.context, error.problem) if part]
        message = f"YAML syntax: {', '.join(parts)}"
        quote = self.open_quote(error)
        if quote is not None:
            hint = f"close the quote that opens on line {quote.line + 1}"
            self.halt("yaml-syntax", message, hint, quote)
        mark: Any = error.problem_mark
        is_in_token = "scanning" in text_of(error.context) and "tab" not in text_of(error.problem)
        if is_in_token and error.context_mark is not None:
            # A token that does not end is noticed late.
            mark = error.context_mark
        lines = self.source.lines
        hint = hint_for(error, lines[min(mark.line, len(lines) - 1)])
        self.halt("yaml-syntax", message, hint, mark)

    def open_quote(self, error: yaml.MarkedYAMLError) -> Any:
        """Return where a quote opens whose text goes on over several lines into the error."""
        stopped: Any = error.problem_mark
        opened: Any = None
        if "quoted" in text_of(error.context):
            opened = error.context_mark
            if "end of stream" in text_of(error.problem):
                return opened
        elif self.quoted is not None and self.quoted.end_mark.line == stopped.line:
            opened = self.quoted.start_mark
        if opened is None or opened.line >= stopped.line:
            return None
        return opened

    def read_event(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self.attach(self.scalar(event))
        elif isinstance(event, yaml.AliasEvent):
            self.attach(self.alias(event))
        elif isinstance(event, yaml.CollectionStartEvent):
            data: object = []
            if isinstance(event, yaml.MappingStartEvent):
                data = {}
            node = _Collection(data, event.start_mark, event.end_mark, flow=event.flow_style)
            self.register(event, node)
            self.stack.append(node)
            if len(self.stack) > _MAX_DEPTH:
                self.refuse_depth(node.start)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.attach(self.close(event))

    def register(self, event: Any, node: _Node) -> None:
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:80]
            self.note("yaml-tag", f"the YAML tag {tag} is not allowed", indicator_hint("!"), node)

    def scalar(self, event: Any) -> _Node:
        text = event.value
        plain = not event.style and event.tag is None
        if event.style in ("'", '"'):
            self.quoted = event
        size = 1 + len(text) // 64  # an alias may repeat a long text
        data = text
        if not text and event.tag is not None:
            # `!bias` is a tag without a value. Its text as the value avoids a second problem.
            data = event.tag
        node = _Node(data, event.start_mark, event.end_mark, plain, size)
        self.register(event, node)
        if plain:
            try:
                node.data = _core_value(text)
            except ValueError:
                node.data = 0
                hint = f"whole numbers have at most {_MAX_INT} digits; floats are written 1e300"
                self.note("too-large", f"a number of {len(text)} digits", hint, node)
        return node

    def alias(self, event: Any) -> _Node:
        name = event.anchor
        node = self.anchors.get(name)
        if node is None:
            node = _Node(f"*{name}", event.start_mark, event.end_mark)
            message = f"YAML syntax: there is no anchor &{name[:80]}"
            self.note("yaml-syntax", message, indicator_hint("*"), node)
        if isinstance(node, _Collection) and node.open:
            self.halt("too-large", f"*{name[:80]} contains itself", "", event.start_mark)
        return node

    def close(self, event: Any) -> _Node:
        node = self.stack.pop()
        node.open = False
        node.end = event.end_mark
        return node

    def attach(self, node: _Node) -> None:
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        parent.size += node.size
        if parent.size > _MAX_NODES:
            self.halt("too-large", f"over {_MAX_NODES} values behind aliases", "", parent.start)
        if isinstance(parent.data, list):
            parent.items[len(parent.data)] = node
            parent.data.append(node.data)
        elif parent.key is None:
            parent.key = node
        else:
            key = parent.key
            parent.key = None
            self.pair(parent, key, node)

    def pair(self, parent: _Collection, key: _Node, value: _Node) -> None:
        name = key.data
        if key.plain and name == "<<":
            self.note("merge-key", "the merge key << is not allowed", "write the keys out", key)
            return
        if not isinstance(name, str):
            kind = _KINDS.get(type(name), "a number")
            self.note("key-type", f"keys must be text, this one is {kind}", "quote the key", key)
            return
        first = parent.keys.get(name)
        if first is not None:
            message = f"duplicate key `{name[:80]}` (first on line {first.start.line + 1})"
            self.note("duplicate-key", message, "remove one of the two", key)
            return
        parent.keys[name] = key
        parent.items[name] = value
        parent.data[name] = value.data


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
        if len(text) > _MAX_INT:
            raise ValueError(text)
        return int(text, _BASES[kind])
    if kind == "float":
        return float(text)
    return float(text.replace(".", ""))  # `.inf` or `.nan`
