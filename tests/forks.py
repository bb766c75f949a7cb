"""Runs scripts in forks of one Python that has imported torch, so that each need not import it anew.

Importing torch and its compiler takes longer than all else that most scripts here do. The server, which
is this file run as a script, imports them once and forks a child for each script. In the child torch
counts as not imported: `import torch` passes all finders, the launcher's among them, and then gets the
module that is there. `sitecustomize` runs, and a script that replaces itself by another is followed.

What depends on how Python starts or dies (flags, signals, `spawn`, `torchrun`) needs a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

TESTS = Path(__file__).parent
POLL_SECONDS = 0.01
# What the server imports, beside the launcher.
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "gradsurgeon.report",
)
# Variables that each script is given by itself.
STEERING = ("PYTHON", "COVERAGE", "GRADSURGEON")
# As it is before a launcher or coverage replaces it.
EXIT = os._exit


class Fork:
    """A script under way; its streams are files."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def wait(self, timeout: float) -> subprocess.CompletedProcess[bytes]:
        """Return its exit code, negative for a signal, and what it wrote; kill it at the timeout."""
        limit = time.monotonic() + timeout
        while not (self._folder / "code").exists():
            self._server.check()
            if time.monotonic() > limit:
                self.kill()
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(POLL_SECONDS)
        code = int((self._folder / "code").read_text())
        out, err = ((self._folder / name).read_bytes() for name in ("out", "err"))
        return subprocess.CompletedProcess((), code, out, err)

    def kill(self) -> None:
        """End it, if it has not ended."""
        pid = self._folder / "pid"
        if pid.exists() and not (self._folder / "code").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


class Server:
    """The Python that forks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        read, self._requests = os.pipe()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(STEERING)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(read)],
            env={**kept, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[read],
            # An interrupt is for pytest, at whose end the server ends.
            start_new_session=True,
        )
        os.close(read)

    def start(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: bytes = b""
    ) -> Fork:
        """Start a script.

        Args:
            words: what comes after `python`: a script, or `-m` and a module, and its arguments.
            cwd: the working directory.
            env: the whole environment.
            stdin: what it reads.
        """
        folder = Path(self._folder.name) / str(next(self._numbers))
        folder.mkdir()
        (folder / "in").write_bytes(stdin)
        request = {"words": words, "cwd": str(cwd), "env": dict(env), "folder": str(folder)}
        # Lines of several threads must not mix, and a pipe takes only short ones in one piece.
        (folder / "request").write_text(json.dumps(request))
        os.write(self._requests, f"{folder}\n".encode())
        return Fork(self, folder)

    def check(self) -> None:
        """Fail where the server has ended."""
        assert self._process.poll() is None, "the server of forks has ended"

    def stop(self) -> None:
        """End the server, which ends once nobody can ask any more, and remove all files."""
        os.close(self._requests)
        self._process.wait()
        self._folder.cleanup()


_SERVERS: list[Server] = []
_LOCK = threading.Lock()


def start(words: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: bytes = b"") -> Fork:
    """Start a script, see `Server.start`; the server is started when it is first needed."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(Server())
    return _SERVERS[0].start(words, cwd=cwd, env=env, stdin=stdin)


def stop() -> None:
    """Stop the server, if there is one."""
    while _SERVERS:
        _SERVERS.pop().stop()


# What follows runs in the server and in its children.


class Replaced(BaseException):
    """A child has called `os.execve` to run another script by the same Python."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(words)
        self.words = words
        self.env = env


class Imported:
    """Finds a module that has been executed already, for who imports it again."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the module, and nothing else."""
        return ModuleSpec(name, self) if name == self._module.__name__ else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing; the module is what it was."""
        module.__spec__ = self._spec
        sys.meta_path.remove(self)


def serve(requests: int) -> NoReturn:
    """Fork a child for each line that comes, until nobody can write any more."""
    children: dict[int, Path] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([requests], [], [], POLL_SECONDS if children else None)
        if ready:
            more = os.read(requests, 1 << 16)
            if not more:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, pending = (pending + more).split(b"\n")
            for line in lines:
                folder = Path(os.fsdecode(line))
                pid = os.fork()
                if not pid:
                    os.close(requests)
                    become(**json.loads((folder / "request").read_text()))
                children[pid] = folder
                (folder / "pid").write_text(str(pid))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            folder = children.pop(pid)
            (folder / "ended").write_text(str(os.waitstatus_to_exitcode(status)))
            (folder / "ended").rename(folder / "code")


def become(words: list[str], cwd: str, env: dict[str, str], folder: str) -> NoReturn:
    """Do as a Python that has been started with these words."""
    for number, name in enumerate(("in", "out", "err")):
        file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_APPEND)  # noqa: PTH118
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    tempfile.tempdir = None  # which the variables of the script name
    execve = os.execve

    def replace(program: str, command: list[str], env: dict[str, str]) -> NoReturn:
        flags = command[1:2] != ["-m"] and command[1].startswith("-")
        if program != sys.executable or flags:
            execve(program, command, env)
        raise Replaced(command[1:], env)

    os.execve = replace  # type: ignore[assignment]
    sys.meta_path.insert(0, Imported(sys.modules.pop("torch")))
    path = list(sys.path)
    while True:
        os.environ.clear()
        os.environ.update(env)
        try:
            run(words, path)
        except Replaced as other:
            words, env = list(other.words), dict(other.env)
        except SystemExit as error:
            leave(error.code)
        except Exception as error:  # noqa: BLE001 # whatever the script raises
            leave(shown(error))
        else:
            leave(0)


def run(words: list[str], path: list[str]) -> None:
    """Run a script, or a module, as `__main__`."""
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*(map(os.path.abspath, given.split(os.pathsep) if given else ())), *path]
    sys.orig_argv[:] = [sys.executable, *words]
    sys.modules.pop("sitecustomize", None)
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage  # only where it is measured

        coverage.process_startup()
    if importlib.util.find_spec("sitecustomize"):
        __import__("sitecustomize")
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 # pathlib does the same
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    file = os.path.abspath(words[0])  # noqa: PTH100 # as Python does it
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))  # noqa: PTH120 # as above
    loader = SourceFileLoader("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __builtins__=__builtins__)
    exec(compile(Path(file).read_bytes(), file, "exec"), vars(main))


def shown(error: Exception) -> int:
    """Show an error that nobody has caught as Python does; return the exit code."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error, traceback)
    return 1


def leave(code: str | int | None) -> NoReturn:
    """Do what Python does at its end, but for taking apart all that has been imported: that takes seconds."""
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 # as Python does it
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A script may have closed it, or put nothing in its place.
        with contextlib.suppress(ValueError, AttributeError):
            stream.flush()
    EXIT(code or 0)


def main() -> None:
    """Import what scripts need, and serve."""
    # The package of this checkout, wherever another one is installed; scripts are told the path by themselves.
    sys.path[0] = str(TESTS.parent)
    for name in MODULES:
        importlib.import_module(name)
    launcher = importlib.import_module("gradsurgeon.integrations.launcher")
    for module in pkgutil.iter_modules(launcher.__path__, "gradsurgeon.integrations.launcher."):
        importlib.import_module(module.name)
    del sys.path[0]
    # The collector of a child would write to all pages of what has been imported.
    gc.freeze()
    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
