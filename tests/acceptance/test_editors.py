"""Rule files in an editor: the language server for YAML with the schema that packs name."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from commands import ROOT

SERVER = shutil.which(os.environ.get("YAML_LANGUAGE_SERVER", "yaml-language-server"))
PACKS = sorted((ROOT / "rules").glob("*.yaml"))


class Editor:
    """A client of the language server protocol that opens files and waits for what is said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._in, self._out = process.stdin, process.stdout
        self._send(id=0, method="initialize", params={"capabilities": {}, "processId": None})
        while self._receive().get("id") != 0:
            pass
        self._send(method="initialized", params={})
        yaml = {"validate": True, "schemaStore": {"enable": False}}
        self._send(method="workspace/didChangeConfiguration", params={"settings": {"yaml": yaml}})

    def problems(self, file: pathlib.Path) -> list[tuple[int, str]]:
        """Return line and text of what the editor would underline."""
        text = file.read_text(encoding="utf-8")
        document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        while True:
            message = self._receive()
            if "id" in message and "method" in message:
                self._send(id=message["id"], result=None)
            found = message.get("params") or {}
            same = message.get("method") == "textDocument/publishDiagnostics"
            if same and found["uri"] == document["uri"]:
                said = found["diagnostics"]
                return [(one["range"]["start"]["line"] + 1, one["message"]) for one in said]

    def _send(self, **message: object) -> None:
        assert self._in is not None
        raw = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._in.write(b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))
        self._in.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._out is not None
        length = 0
        while line := self._out.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server has gone"
        found: dict[str, Any] = json.loads(self._out.read(length))
        return found


@pytest.fixture(scope="module")
def editor() -> Iterator[Editor]:
    if SERVER is None:
        pytest.skip("no yaml-language-server here: npm install -g yaml-language-server")
    with subprocess.Popen(
        [SERVER, "--stdio"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield Editor(process)
        process.kill()


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.stem)
def test_every_pack_names_the_schema_beside_it(pack: pathlib.Path) -> None:
    first = pack.read_text(encoding="utf-8").partition("\n")[0]
    assert first == "# yaml-language-server: $schema=./rules.schema.json"
    assert (pack.parent / "rules.schema.json").is_file()


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.stem)
def test_an_editor_has_nothing_to_say_of_a_pack(editor: Editor, pack: pathlib.Path) -> None:
    assert editor.problems(pack) == []


def test_an_editor_underlines_what_is_wrong(editor: Editor, tmp_path: pathlib.Path) -> None:
    shutil.copy(ROOT / "rules" / "rules.schema.json", tmp_path)
    lines = [
        "# yaml-language-server: $schema=./rules.schema.json",
        "version: 1",
        "rules:",
        "  - id: a",
        "    action: scale",
        '    params: "*"',
        "    factor: big",
        "    nope: 1",
    ]
    (tmp_path / "wrong.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = editor.problems(tmp_path / "wrong.yaml")
    assert {line for line, _ in found} == {7, 8}, found
