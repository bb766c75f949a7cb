"""A pull request: its checkout, the event, and an API of GitHub on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from bounds import TIMEOUT
from commands import CLEAN, ROOT, environment, git
from ranks import Json

ACTION = ROOT / ".github" / "actions" / "review"
WRONG = CLEAN.replace("norm-log", "norm-lg")
PARAMS = {
    "version": 1,
    "origin": "by hand",
    "hash": "sha256:" + "0" * 64,
    "params": [
        {
            "name": f"fc.{name}",
            "aliases": [],
            "shape": shape,
            "dtype": "float32",
            "requires_grad": True,
            "module_type": ["Linear", "Module"],
        }
        for name, shape in (("weight", [2, 3]), ("bias", [2]))
    ],
    "modules": [{"name": "fc", "type": ["Linear", "Module"]}],
}


@dataclass
class GitHub:
    """An API with the comments of one pull request."""

    url: str = ""
    readonly: bool = False
    comments: list[Json] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    given: list[str | None] = field(default_factory=list)


@contextmanager
def api() -> Iterator[GitHub]:
    """Serve such an API on this machine."""
    state = GitHub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, data: object, status: int = 200) -> None:
            raw = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def body(self) -> str:
            length = int(self.headers["Content-Length"] or 0)
            return str(json.loads(self.rfile.read(length))["body"])

        def handle_one(self) -> None:
            state.asked.append(f"{self.command} {self.path}")
            comments = "/repos/me/net/issues/7/comments"
            if self.headers["Authorization"] != "Bearer secret":
                self.answer({}, 401)
            elif self.command == "GET" and self.path.startswith(comments):
                page = int(self.path.rpartition("=")[2])
                self.answer(state.comments[100 * (page - 1) : 100 * page])
            elif state.readonly:
                self.body()
                self.answer({"message": "Resource not accessible by integration"}, 403)
            elif self.command == "POST" and self.path == comments:
                one = {"id": len(state.comments) + 1, "body": self.body(), "user": {"type": "Bot"}}
                state.comments.append(one)
                self.answer(one, 201)
            elif found := re.fullmatch("/repos/me/net/issues/comments/([0-9]+)", self.path):
                state.comments[int(found[1]) - 1]["body"] = self.body()
                self.answer({})
            else:
                self.answer({}, 404)

        do_GET = do_POST = do_PATCH = handle_one  # noqa: N815 # names of the standard library

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # as above
            pass

    with _served(Handler, state):
        yield state


@contextmanager
def answering(raw: bytes) -> Iterator[GitHub]:
    """Serve something on this machine that answers every request with the same bytes."""
    state = GitHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            state.asked.append(f"{self.command} {self.path}")
            state.given.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.wfile.write(raw)

        do_GET = do_POST = do_PATCH = handle_one  # noqa: N815 # names of the standard library

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # as above
            pass

    with _served(Handler, state):
        yield state


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler], state: GitHub) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Job:
    """A checkout of a pull request and what a job leaves behind."""

    folder: Path
    github: GitHub
    base: str = ""

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.checkout / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        git(self.checkout, "add", "-A")
        git(self.checkout, "commit", "-qm", "x")

    def run(
        self, *arguments: str, event: str = "pull_request", **inputs: str
    ) -> subprocess.CompletedProcess[str]:
        payload = {"pull_request": {"number": 7, "base": {"sha": self.base}}}
        (self.folder / "event.json").write_text(json.dumps(payload))
        for name in ("summary.md", "output"):
            (self.folder / name).write_text("")
        env = {
            "GITHUB_EVENT_NAME": event,
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_WORKSPACE": str(self.checkout),
            "GITHUB_REPOSITORY": "me/net",
            "GITHUB_API_URL": self.github.url,
            "RUNNER_TEMP": str(self.folder),
            "NO_PROXY": "127.0.0.1",
            "INPUT_TOKEN": "secret",
            **{f"INPUT_{name.upper()}": value for name, value in inputs.items()},
        }
        return subprocess.run(
            [sys.executable, "-P", str(ACTION / "review.py"), *arguments],
            cwd=self.checkout,
            env={**environment(), **env},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIMEOUT,
            check=False,
        )

    @property
    def summary(self) -> str:
        return (self.folder / "summary.md").read_text(encoding="utf-8")

    @property
    def outputs(self) -> dict[str, str]:
        text = (self.folder / "output").read_text()
        return dict(line.split("=", 1) for line in text.splitlines())


@contextmanager
def pull_request(folder: Path) -> Iterator[Job]:
    """Yield a pull request whose base has one clean rule file."""
    with api() as github:
        one = Job(folder, github)
        one.checkout.mkdir()
        git(one.checkout, "init", "-q")
        one.write({"rules.yaml": CLEAN, "other.yaml": "[", "params.json": json.dumps(PARAMS)})
        one.base = git(one.checkout, "rev-parse", "HEAD")
        yield one
