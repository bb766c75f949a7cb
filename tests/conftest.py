"""Every test starts from the same random state, on one thread, so that bits can be compared.

`python -m pytest` leaves out what is marked as slow, and gives property tests a tenth of their examples;
`--everything`, `-m` and a file that is named bring both back. `tests/README.md` says what is slow.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import forks
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MEASURES = "COVERAGE_PROCESS_CONFIG"
# A file that is slow as a whole.
SLOW_FILE = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.MULTILINE)

# Python's collector would walk through all of torch some thousand times, and find nothing there.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run the slow tests as well, and property tests with all their examples",
    )


def pytest_cmdline_main(config: pytest.Config) -> None:
    # A worker begins with a part of the tests, in their order, and takes from the end of another's part when it is
    # done: nearly all files stay whole, so tests of a file share what they start. A worker that crashes ends the run.
    if getattr(config.option, "dist", "no") == "load":  # only if pytest-xdist is installed
        config.option.dist = "worksteal"
        config.option.maxworkerrestart = "0"


# After the plugins, whose own warnings must not end a session.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not _is_whole(config):
        # Before `fuzzing` is imported.
        os.environ.setdefault("GRADSURGEON_TEST_SHARE", "0.1")
    # Other releases of libraries have warnings of their own.
    ours = "error::gradsurgeon.errors.GradSurgeonWarning"
    config.addinivalue_line("filterwarnings", ours if _other_releases() else "error")


def pytest_report_header() -> str | None:
    others = _other_releases()
    if not others:
        return None
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"warnings of libraries are no errors: {others[0]}{more} not installed"


@cache
def _other_releases() -> tuple[str, ...]:
    """Return the requirements of the tests that the installed packages do not meet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, project["optional-dependencies"]["dev"])
    # The package itself may lie on the path.
    return tuple(str(one) for one in wanted if not (one.extras or _is_met(one)))


def _is_met(wanted: Requirement) -> bool:
    try:
        return version(wanted.name) in wanted.specifier
    except PackageNotFoundError:
        return False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Every worker imports every file, and with some of them a trainer or a tracker, which need not be installed.
    if config.option.markexpr == "cuda" and not _needs_cuda(collection_path):
        return True
    left_out = collection_path.name.startswith("test_") and not _is_whole(config)
    if left_out and SLOW_FILE.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


def _needs_cuda(path: Path) -> bool:
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return any("pytest.mark.cuda" in file.read_text(encoding="utf-8") for file in files)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _is_whole(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def _is_whole(config: pytest.Config) -> bool:
    named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return bool(config.option.everything or config.option.markexpr or named)


# Three fixtures for what would be seven: each costs every one of thousands of tests half a millisecond.


@pytest.fixture(autouse=True, scope="session")
def _session() -> Iterator[str | None]:
    # What makes Python measure coverage from its start. Where torch is imported it takes half as long
    # again, and hundreds of processes run through the same few files.
    yield os.environ.pop(MEASURES, None)
    forks.stop()


@pytest.fixture(autouse=True, scope="module")
def _file(_session: str | None, request: pytest.FixtureRequest) -> Iterator[None]:
    # Sessions look for optimizers among all live objects. What is there before the tests of a file
    # begin, such as torch itself, need not be searched a hundred times.
    gc.collect()
    gc.freeze()
    # Before whatever processes its tests share.
    with _measured(_session, request):
        yield


@pytest.fixture(autouse=True)
def _test(_session: str | None, request: pytest.FixtureRequest) -> Iterator[None]:
    # Torch-free tests must stay torch-free.
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
    with _measured(_session, request):
        yield
    if "gradsurgeon.runtime.registry" in sys.modules:
        from gradsurgeon.runtime import registry

        # A session that a failed test left behind must not meet the optimizers of the next one.
        for session in list(registry._attached):
            session.context.event_log.never_fired = list  # type: ignore[method-assign]
            session.remove()
    if "torch._dynamo.convert_frame" in sys.modules:
        # What one test has compiled, rules on modules would drop in the next one, with a warning.
        cast("Any", sys.modules["torch._dynamo"]).reset()


@contextmanager
def _measured(how: str | None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let coverage be measured in children where a test, or a whole file, asks for it."""
    before = os.environ.pop(MEASURES, None)
    if how and request.node.get_closest_marker("cover_children"):
        os.environ[MEASURES] = how
    yield
    os.environ.pop(MEASURES, None)
    if before is not None:
        os.environ[MEASURES] = before
