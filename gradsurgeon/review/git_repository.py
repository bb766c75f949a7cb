"""Asking git about a repository whose configuration is not believed: it may belong to a stranger.

A configuration can make git run commands in places without end, and every version adds some. So it is
not overruled key by key: git gets a folder of its own in the place of `.git`, in which there are links to
the refs and the objects and nothing else. What git then does not find, whatever its version:

| what a repository may bring along       | what git would do with it                                     |
|-----------------------------------------|---------------------------------------------------------------|
| `extensions.partialClone`, a `promisor` | fetch an object that is missing, and with that run ...        |
| `remote.*.uploadpack`, `url = ext::...` | ... these commands,                                           |
| `core.sshCommand`, `core.gitProxy`      | ... these,                                                    |
| `credential.helper`, `core.askPass`     | ... and these, or reach a server (`fetch.bundleURI`)          |
| `core.fsmonitor`, `core.pager`, `alias` | run them with commands that look at files or print            |
| `diff.*`, `filter.*`, `.gitattributes`  | run them over what it shows                                   |
| `include.path`, `config.worktree`       | take any of these from elsewhere                              |
| `hooks/`, `core.hooksPath`, `gpg.*`     | run them when refs change or signatures are asked for         |
| `info/alternates`, `refs/replace`,      | read objects of other repositories, or other objects than     |
| `info/grafts`, `info/commit-graph`      | those that a commit names                                     |

Only the discovery reads the configuration; that looks at no object. A bare repository is not discovered
at all: as ordinary files inside a clone it would stand in the place of the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 60
# What a user may have set for discovery. All else that begins with GIT_ leads git elsewhere.
_KEPT_VARIABLES = (
    "GIT_CEILING_DIRECTORIES",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
    "GIT_EXEC_PATH",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
)
_SHARED = ("refs", "packed-refs", "reftable", "shallow", "logs/refs")
_OBJECTS = ("objects/pack", *(f"objects/{number:02x}" for number in range(256)))
_OF_WORKING_TREE = ("logs/HEAD", "FETCH_HEAD", "ORIG_HEAD", "MERGE_HEAD")
# What names refs (`@{upstream}`) or says how objects and refs are stored; none of it is a command.
_WANTED_KEYS = (
    r"^(branch\..*\.(remote|merge)|remote\..*\.fetch|extensions\.(objectformat|refstorage))$"
)
_FORMATS = {
    "extensions.objectformat": ("sha1", "sha256"),
    "extensions.refstorage": ("files", "reftable"),
}


class GitError(Exception):
    """Git could not do what it was asked; the text is what it said."""


class Repository:
    """The repository of the current folder.

    Attributes:
        prefix: the current folder from the top of the working tree, as git writes it.

    Raises:
        GitError: there is none, or git is not there.
    """

    def __init__(self) -> None:
        options = ("--absolute-git-dir", "--git-common-dir", "--show-prefix")
        printed = _run(_environment(), "rev-parse", *options).decode("utf-8", "surrogateescape")
        git_dir, common_dir, self.prefix, *_ = [*printed.split("\n"), "", ""]
        gitdir, shared = Path(git_dir).resolve(), Path(common_dir).resolve()
        if Path.cwd().resolve().is_relative_to(gitdir):
            raise GitError(f"it is a bare repository, or the inside of one: {gitdir}")
        folder = Path(tempfile.mkdtemp(prefix="gradsurgeon-git-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            borrowed = shared / "objects/info/alternates"
            if borrowed.exists() and borrowed.stat().st_size:
                raise GitError(f"the repository borrows objects from elsewhere: {borrowed}")
            self._environment = _make_git_dir(folder, gitdir, shared)
        except OSError as error:
            raise GitError(f"cannot link to the repository: {error.strerror or error}") from None

    def ask(self, *arguments: str) -> bytes:
        """Run git and return what it prints.

        Raises:
            GitError: it fails or takes too long.
        """
        return _run(self._environment, *arguments)


def _environment(**more: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key in _KEPT_VARIABLES
    }
    return {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **more}


def _make_git_dir(folder: Path, git_dir: Path, common: Path) -> dict[str, str]:
    """Make a folder that git takes for `.git`; return the environment in which git uses it."""
    head = git_dir / "HEAD"
    linked = b"ref: %s\n" % os.fsencode(head.readlink()) if head.is_symlink() else b""
    (folder / "HEAD").write_bytes(linked or head.read_bytes())
    (folder / "logs").mkdir()
    (folder / "objects").mkdir()
    for source, names in ((common, (*_SHARED, *_OBJECTS)), (git_dir, _OF_WORKING_TREE)):
        for name in names:
            if (source / name).exists():
                (folder / name).symlink_to(source / name)
    environment = _environment(
        GIT_DIR=str(folder),
        GIT_NO_REPLACE_OBJECTS="1",
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
    )
    return {**environment, **_configure(folder / "config", common / "config", environment)}


def _configure(config: Path, theirs: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write how objects and refs are stored into a configuration; return the other keys as variables."""
    wanted = ("--null", "--get-regexp", _WANTED_KEYS)
    printed = _run(environment, "config", "--file", str(theirs), *wanted, fails=(1,))
    lines = ["[core]", "repositoryformatversion = 1", "bare = true", "[extensions]"]
    rest = []
    for entry in filter(None, printed.decode("utf-8", "surrogateescape").split("\0")):
        key, _, value = entry.partition("\n")
        if key not in _FORMATS:
            rest.append((key, value))
        elif value in _FORMATS[key]:
            lines.append(f"{key.rpartition('.')[2]} = {value}")
        else:
            raise GitError(f"the repository has an unknown {key}: {value[:60]!r}")
    config.write_text("\n".join(lines) + "\n")
    variables = {"GIT_CONFIG_COUNT": str(len(rest))}
    for number, (key, value) in enumerate(rest):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


def _git() -> str:
    """Return the path of git. A relative folder on the path is skipped: a repository could bring its own git."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if Path(folder).is_absolute() and (path := shutil.which(str(Path(folder, "git")))):
            return path
    raise GitError("git is not installed")


def _run(environment: Mapping[str, str], *arguments: str, fails: tuple[int, ...] = ()) -> bytes:
    """Return what git prints. An exit code in ``fails`` is no error."""
    try:
        done = subprocess.run(  # noqa: S603 # no shell, and no argument that begins with a dash
            (_git(), *arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise GitError(f"git cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git took more than {_SECONDS} seconds") from None
    if done.returncode and done.returncode not in fails:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
        raise GitError(f"git says: {said or f'nothing, and ends with {done.returncode}'}")
    return done.stdout
