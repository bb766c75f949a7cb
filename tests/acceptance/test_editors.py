"""Rule files in an editor: the language server for YAML with the schema that packs name."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, pasted
from ranks import Json

from gradsurgeon.actions import ACTIONS
from gradsurgeon.cli.schema import rule_schema
from gradsurgeon.language.packs import published

SERVER = shutil.which(os.environ.get("YAML_LANGUAGE_SERVER", "yaml-language-server"))
PACKS = sorted((ROOT / "rules").glob("*.yaml"))


class Editor:
    """A client of the language server protocol that opens files and waits for what is said."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path | None = None,
        schemas: Json | None = None,
    ) -> None:
        self._in, self._out = process.stdin, process.stdout
        self._asked = 0
        start: Json = {"capabilities": {}, "processId": None}
        if folder is not None:
            start["rootUri"] = folder.as_uri()
        self._send(id=0, method="initialize", params=start)
        while self._receive().get("id") != 0:
            pass
        self._send(method="initialized", params={})
        store = {"enable": False}
        self._settings = {"validate": True, "schemaStore": store, "schemas": schemas or {}}
        self._send(method="workspace/didChangeConfiguration", params={"settings": {}})

    def problems(self, file: Path) -> list[tuple[int, str]]:
        """Return line and text of what the editor would underline."""
        text = file.read_text(encoding="utf-8")
        document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        while True:
            message = self._receive()
            self._answer(message)
            found = message.get("params") or {}
            same = message.get("method") == "textDocument/publishDiagnostics"
            if same and found["uri"] == document["uri"]:
                said = found["diagnostics"]
                return [(one["range"]["start"]["line"] + 1, one["message"]) for one in said]

    def hover(self, file: Path, line: int, col: int) -> str:
        """Return what the editor would show beside the mouse."""
        found = self._ask("hover", file, line, col)
        return str(found["contents"]["value"])

    def offered(self, file: Path, line: int, col: int) -> dict[str, str]:
        """Return what the editor would offer to write, and what it says of each."""
        items = self._ask("completion", file, line, col)["items"]
        return {one["label"]: str(one.get("documentation") or "") for one in items}

    def _ask(self, what: str, file: Path, line: int, col: int) -> Any:
        self._asked += 1
        where = {
            "textDocument": {"uri": file.as_uri()},
            "position": {"line": line - 1, "character": col - 1},
        }
        self._send(id=self._asked, method=f"textDocument/{what}", params=where)
        while True:
            message = self._receive()
            if message.get("id") == self._asked and "method" not in message:
                return message["result"]
            self._answer(message)

    def _answer(self, message: Json) -> None:
        """Tell the server its settings where it asks for them, and of all else that there is nothing."""
        result = None
        if message.get("method") == "workspace/configuration":
            asked = [item["section"] for item in message["params"]["items"]]
            result = [self._settings if section == "yaml" else None for section in asked]
        if "id" in message and "method" in message:
            self._send(id=message["id"], result=result)

    def _send(self, **message: object) -> None:
        assert self._in is not None
        raw = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._in.write(b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))
        self._in.flush()

    def _receive(self) -> Json:
        assert self._out is not None
        length = 0
        while line := self._out.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server has gone"
        found: Json = json.loads(self._out.read(length))
        return found


@contextmanager
def opened(*settings: Any) -> Iterator[Editor]:
    if SERVER is None:
        pytest.skip("no yaml-language-server here: npm install -g yaml-language-server")
    with subprocess.Popen(
        [SERVER, "--stdio"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield Editor(process, *settings)
        process.kill()


@pytest.fixture(scope="module")
def editor() -> Iterator[Editor]:
    with opened() as one:
        yield one


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.stem)
def test_an_editor_has_nothing_to_say_of_a_pack(editor: Editor, pack: Path) -> None:
    assert editor.problems(pack) == []


HEAD = "# yaml-language-server: $schema=./rules.schema.json\n"
RULE = HEAD + "version: 1\nrules:\n  - id: a\n"


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    shutil.copy(ROOT / "rules" / "rules.schema.json", tmp_path)
    numbers = itertools.count()

    def write(text: str) -> Path:
        file = tmp_path / f"{next(numbers)}.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            RULE + '    action: scale\n    params: "*"\n    factor: big\n    nope: 1\n',
            {7: "number", 8: "nope is not allowed"},
        ),
        (RULE + '    action: scael\n    params: "*"\n    factor: 2\n', {5: '"scale"'}),
        (RULE + "    action: explode\n", {4: "params", 5: '"combine" | "conflict" | "freeze"'}),
        (RULE + '    params: "*"\n', {4: '"action"'}),
        (RULE + '    action: scale\n    params: "*"\n', {4: '"factor"'}),
        (RULE + "    action: zero\n", {4: '"params"'}),
        (
            RULE + '    action: clip-norm\n    params: "*"\n    at: later\n    max_norm: -1\n',
            {7: '"step", "backward"', 8: "below the minimum of 0"},
        ),
        (
            RULE.replace("a\n", "No Bias\n") + '    action: zero\n    params: "*"\n',
            {4: "such as `no-bias`"},
        ),
        (
            RULE
            + '    action: zero\n    params: "*"\n  - id: b\n    action: zero\n    params: 3\n',
            {9: "string | array"},
        ),
        (HEAD + "version: 2\ninclude: [gradsurgeon:clip@7]\n", {2: "must be 1", 3: "clip@1"}),
        (HEAD + "version: 1\nrulez: []\n", {2: '"rules"', 3: "rulez is not allowed"}),
    ],
)
def test_an_editor_underlines_what_is_wrong(
    editor: Editor, written: Callable[[str], Path], text: str, said: dict[int, str]
) -> None:
    found = dict(editor.problems(written(text)))
    assert sorted(found) == list(said), found
    for line, words in said.items():
        assert words in found[line]


def test_an_editor_finds_the_schema_by_the_names_that_the_guide_has(tmp_path: Path) -> None:
    settings = json.loads(pasted("json").partition("\n")[2])
    (target,) = settings["yaml.schemas"]
    shutil.copy(ROOT / "rules" / "rules.schema.json", tmp_path / target)
    (tmp_path / "deep").mkdir()
    found = {}
    with opened(tmp_path, settings["yaml.schemas"]) as editor:
        for name in ("rules", "gradsurgeon", "deep/rules", "deep/net.gradsurgeon", "config"):
            file = tmp_path / f"{name}.yaml"
            file.write_text("version: 1\nrulez: []\n", encoding="utf-8")
            found[name] = ["rulez is not allowed" in text for _, text in editor.problems(file)]
    assert {name: any(said) for name, said in found.items()} == {
        "rules": True,
        "gradsurgeon": True,
        "deep/rules": True,
        "deep/net.gradsurgeon": True,
        "config": False,
    }


def test_an_editor_tells_what_a_key_means(editor: Editor, written: Callable[[str], Path]) -> None:
    file = written(
        RULE + '    action: clip-norm\n    params: "*"\n    at: step\n    max_norm: 1.0\n'
    )
    assert editor.problems(file) == []
    words = {
        2: "Version of the rule language",
        3: "within one point they act in this order",
        4: "Unique name of the rule",
        5: "Shorten a gradient that is longer than a bound",
        6: "Patterns of parameter names",
        7: "The moment at which the rule acts",
        8: "The largest norm that stays as it is",
    }
    for line, said in words.items():
        assert said in editor.hover(file, line, 2 if line < 4 else 6)
    assert "* `backward`" in editor.hover(file, 7, 6)


def test_an_editor_offers_the_actions_and_what_the_chosen_one_takes(
    editor: Editor, written: Callable[[str], Path]
) -> None:
    file = written(RULE + "    action: ")
    editor.problems(file)
    offered = editor.offered(file, 5, 13)
    assert set(offered) == set(ACTIONS)
    assert offered["freeze"] == "Keep the optimizer off a parameter."

    for action, rule in ACTIONS.items():
        file = written(RULE + f"    action: {action}\n    ")
        editor.problems(file)
        offered = editor.offered(file, 6, 5)
        # A name in the list that is no key is the action as a whole, with all that it needs.
        keys = set(offered) - {action}
        assert keys == set(rule_schema(rule)["properties"]) - {"id", "action"}, action
        assert all(offered[key] for key in keys)

    file = written(RULE + "    action: nan-trap\n    then: ")
    editor.problems(file)
    assert set(editor.offered(file, 6, 11)) == {"raise", "skip-step", "warn"}
    file = written(HEAD + "version: 1\ninclude:\n  - ")
    editor.problems(file)
    assert set(editor.offered(file, 4, 5)) == {f"gradsurgeon:{spec}" for spec in published()}
