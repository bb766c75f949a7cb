"""Rule files as text: YAML 1.2 (core schema) read into plain values with places."""

import os
import pathlib
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import yaml

from gradsurgeon.errors import Place, Problem, RuleFileError

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


_INDICATORS = {"*": "an alias", "&": "an anchor", "!": "a tag", "[": "a list", "{": "a mapping"}
_VALUE = re.compile(r"\s*(?:- +)*(?:[^\s:\"'\[{]+:\s+)?(\S)")  # first character of a line's value


def _mark_at(line: int, column: int) -> yaml.Mark:
    return yaml.Mark("", 0, line, column, None, 0)


def _indicator_hint(char: str) -> str:
    return f'`{char}` starts {_INDICATORS[char]} in YAML: quote patterns, e.g. params: "*.weight"'


def _hint_for(error: yaml.MarkedYAMLError, line: str) -> str:
    context = error.context or ""
    problem = error.problem or ""
    value = _VALUE.match(line[:500])
    first = "*" if "alias" in context else value[1] if value else ""
    if "\t" in line:
        return "YAML does not allow tabs for indentation: use spaces"
    if "unknown escape" in problem:
        return "use single quotes for regular expressions, e.g. 're:.*\\.bias'"
    if first in _INDICATORS and "flow" not in context:
        return _indicator_hint(first)
    if error.context_mark and "flow" in context:
        opened = error.context_mark.line + 1
        return f"is the quote or the bracket that opens on line {opened} closed?"
    return (
        "quote text with special characters, write `key: value` with a blank behind the colon, and give the "
        "keys of one mapping the same indentation; the mistake may be in the line above"
    )


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
        self.file, self.text = file, text.removeprefix("\ufeff")
        self.lines = [line.removesuffix("\r") for line in self.text[:MAX_BYTES].split("\n")]

    def place(self, start: Any, end: Any = None) -> Place:
        last = len(self.lines) - 1
        if start.line > last:  # libyaml ends a file without a line feed on a line of its own
            start = end = _mark_at(last, len(self.lines[last]))
        line = self.lines[start.line]
        end = end or start
        width = (end.column if end.line == start.line else len(line)) - start.column
        return Place(self.file, start.line + 1, start.column + 1, line, max(1, width))


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
        if path and isinstance(parent, _Collection) and (key := parent.keys.get(str(path[-1]))):
            return self._source.place(key.start, key.end)
        return self.place(path)

    def missing_place(self, path: Path) -> Place:
        node = self._find(path)
        first = next(iter(node.keys.values()), None) if isinstance(node, _Collection) else node
        if first is not None:
            return self._source.place(first.start, first.end)
        return self._source.place(node.start if node else _mark_at(0, 0))

    def _find(self, path: Path) -> _Node | None:
        node = self._root
        for element in path:
            if isinstance(node, _Collection) and element in node.items:
                node = node.items[element]
        return node


def read(path: str | os.PathLike[str], name: str = "", raw: bytes | None = None) -> Document:
    """Read a rule file. Messages use ``name`` or its path; ``raw`` is the content, if known."""
    file = os.fspath(path)
    try:
        if raw is None:  # bounded, so a device or a file of gigabytes is refused like any long text
            with pathlib.Path(file).open("rb") as stream:
                raw = stream.read(MAX_BYTES + 4)
        if b"\0" not in raw:
            errors = "strict" if len(raw) <= MAX_BYTES + 3 else "replace"
            document = parse(raw.decode("utf-8-sig", errors), name or file)
            return replace(document, folder=pathlib.Path(file).parent)
        cause = "it holds NUL bytes, so it is binary or UTF-16"
    except UnicodeDecodeError as error:
        cause = f"byte {error.start + 1} is not UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path itself
        cause = getattr(error, "strerror", None) or str(error)
    place = Place(name or file, 1, 1)
    hint = "name a readable file of UTF-8 text"
    raise RuleFileError([Problem(place, "unreadable-file", f"cannot read the file: {cause}", hint)])


def parse(text: str, file: str = "<text>") -> Document:
    reader = _YamlReader(source := _Text(file, text))
    root = None
    try:
        reader.check_text()
        root = reader.walk()
    except _HaltError as halt:
        reader.problems.append(halt.args[0])
    return Document(file, text, root and root.data, tuple(reader.problems), source, root)


class _YamlReader:
    def __init__(self, source: _Text) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.root: _Node | None = None
        self.stack: list[_Collection] = []
        self.anchors: dict[str, _Node] = {}
        self.quoted: Any = None  # the newest event of a text in quotes

    def halt(self, check: str, message: str, hint: str, mark: Any = None) -> NoReturn:
        raise _HaltError(Problem(self.source.place(mark or _mark_at(0, 0)), check, message, hint))

    def note(self, check: str, message: str, hint: str, node: _Node) -> None:
        if len(self.problems) == _MAX_PROBLEMS:
            self.halt(
                "too-large", f"over {_MAX_PROBLEMS} problems: the rest is not read", "", node.start
            )
        place = self.source.place(node.start, node.end)
        self.problems.append(Problem(place, check, message, hint))

    def check_text(self) -> None:
        text = self.source.text
        limit = _MAX_BYTES_PURE if _LOADER is yaml.SafeLoader else MAX_BYTES
        if len(text.encode("utf-8", "surrogatepass")) > limit:
            more = "" if limit == MAX_BYTES else "; PyYAML with libyaml reads files of 1 MiB"
            self.halt("too-large", f"over {limit // 1024} KiB of text", f"use `include`{more}")
        if match := _FORBIDDEN.search(text):
            start = match.start()
            mark = _mark_at(text.count("\n", 0, start), start - text.rfind("\n", 0, start) - 1)
            message = f"YAML syntax: {match[0]!a} is not allowed"
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
            if "maximum nesting depth" in (error.problem or ""):
                self.refuse_depth(error.problem_mark)
            self.halt_at(error)
        if self.root is None or self.root.data is None:
            hint = "a rule file has `version: 1` and a list of `rules`"
            self.halt("empty-file", "the file holds no rules", hint)
        return self.root

    def halt_at(self, error: yaml.MarkedYAMLError) -> NoReturn:
        message = ", ".join(filter(None, (error.context, error.problem)))
        mark: Any = error.problem_mark
        quote = self.open_quote(error)
        if quote is not None:
            hint = f"close the quote that opens on line {quote.line + 1}"
            self.halt("yaml-syntax", f"YAML syntax: {message}", hint, quote)
        # A token that does not end is noticed late.
        if "scanning" in (error.context or "") and "tab" not in (error.problem or ""):
            mark = error.context_mark or mark
        lines = self.source.lines
        hint = _hint_for(error, lines[min(mark.line, len(lines) - 1)])
        self.halt("yaml-syntax", f"YAML syntax: {message}", hint, mark)

    def open_quote(self, error: yaml.MarkedYAMLError) -> Any:
        """Return where a quote opens whose text goes on over several lines into the error."""
        stopped: Any = error.problem_mark
        if "quoted" in (error.context or ""):
            opened: Any = error.context_mark
            unfinished = "end of stream" in (error.problem or "")
            return opened if unfinished or opened.line < stopped.line else None
        text = self.quoted
        if text is None or text.end_mark.line != stopped.line:
            return None
        return text.start_mark if text.start_mark.line < stopped.line else None

    def read_event(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self.attach(self.scalar(event))
        elif isinstance(event, yaml.AliasEvent):
            self.attach(self.alias(event))
        elif isinstance(event, yaml.CollectionStartEvent):
            data: object = {} if isinstance(event, yaml.MappingStartEvent) else []
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
            self.note("yaml-tag", f"the YAML tag {tag} is not allowed", _indicator_hint("!"), node)

    def scalar(self, event: Any) -> _Node:
        text = event.value
        plain = not event.style and event.tag is None
        if event.style in ("'", '"'):
            self.quoted = event
        size = 1 + len(text) // 64  # an alias may repeat a long text
        # `!bias` is a tag without a value. Its text as the value avoids a second problem.
        node = _Node(text or event.tag or "", event.start_mark, event.end_mark, plain, size)
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
            self.note("yaml-syntax", message, _indicator_hint("*"), node)
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
        elif not isinstance(name, str):
            kind = {bool: "true or false", type(None): "nothing"}.get(type(name), "a number")
            self.note("key-type", f"keys must be text, this one is {kind}", "quote the key", key)
        elif first := parent.keys.get(name):
            message = f"duplicate key `{name[:80]}` (first on line {first.start.line + 1})"
            self.note("duplicate-key", message, "remove one of the two", key)
        else:
            parent.keys[name] = key
            parent.items[name] = value
            parent.data[name] = value.data


# Most texts are the keys of rules, which come again and again.
@lru_cache(maxsize=1024)
def _core_value(text: str) -> str | float | bool | None:
    match = _CORE.fullmatch(text)
    kind = match.lastgroup if match else "text"
    if kind in {"int", "oct", "hex"}:
        if len(text) > _MAX_INT:
            raise ValueError(text)
        return int(text, {"int": 10, "oct": 8, "hex": 16}[kind])
    if kind in {"float", "inf", "nan"}:
        return float(text if kind == "float" else text.replace(".", ""))
    return {"null": None, "bool": text.lower() == "true"}.get(kind or "", text)
