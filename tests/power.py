"""What the tests see: changes single lines of the package, one at a time, and counts the changes that no test sees.

```
python tests/power.py draw HEAD --count 200 > changes.json    # the same commit draws the same changes
python tests/power.py try changes.json --tests HEAD > seen.json
python tests/power.py compare seen_before.json seen_after.json
```

A change is an operator, a bound, a branch or a statement in one line. ``try`` checks the package out as it was when the changes
were drawn, with the tests of another commit, runs the quick suite once to learn which test runs which line, and then for each
change the tests that run its line, those that run the fewest lines first. It takes about an hour for 200 changes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import coverage

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "actions", "language", "forensics", "distributed")
OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# A change that no test sees is tried with at most so many tests.
MOST_TESTS = 400
# Seconds for the tests of one change: a changed loop may never end.
LIMIT = 240


@dataclass(frozen=True)
class Change:
    """One changed line; both texts are of the statement, or of the head of it."""

    path: str
    line: int
    kind: str
    before: str
    after: str


# What a change is.


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the kinds of change that a node allows, with the node that takes its place."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITES:
        changed.ops[0] = OPPOSITES[type(node.ops[0])]()
        yield "operator", changed
    elif isinstance(node, ast.BoolOp) or (
        isinstance(node, ast.BinOp)
        and type(node.op) in OPPOSITES
        and not is_text(node.left)
        and not is_text(node.right)
    ):
        changed.op = OPPOSITES[type(node.op)]()
        yield "operator", changed
    elif isinstance(node, ast.Constant) and type(node.value) in {int, float}:
        changed.value += 1
        yield "bound", changed
    elif isinstance(node, (ast.If, ast.IfExp)):
        test = node.test
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        changed.test = test.operand if is_negated else ast.UnaryOp(ast.Not(), test)  # type: ignore[attr-defined]
        yield "branch", changed.test if isinstance(node, ast.If) else changed


def place(node: ast.AST) -> ast.AST:
    """Return what is replaced: of an `if` statement only its test."""
    return node.test if isinstance(node, ast.If) else node


def is_deletable(node: ast.stmt) -> bool:
    if isinstance(node, (ast.AugAssign, ast.Delete)):
        return True
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def bodies(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of functions, without those of messages that are raised."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting = list(function.body)
            while waiting:
                statement = waiting.pop()
                if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Raise)):
                    continue
                yield statement
                waiting.extend(
                    child
                    for child in ast.iter_child_nodes(statement)
                    if isinstance(child, ast.stmt)
                )


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of the statements in it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.JoinedStr):
            continue
        waiting.extend(
            child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)
        )


def changes_of(path: Path, name: str) -> list[Change]:
    """Return every change of a file that stays within one line."""
    text = path.read_text()
    lines = text.splitlines()
    found: dict[tuple[int, str, str], Change] = {}

    def note(node: Any, kind: str, after: str) -> None:
        if node.lineno != node.end_lineno:
            return
        line = lines[node.lineno - 1]
        old = line.encode()
        new = old[: node.col_offset] + after.encode() + old[node.end_col_offset :]
        change = Change(name, node.lineno, kind, line, new.decode())
        if change.before != change.after:
            found[change.line, kind, change.after] = change

    for statement in bodies(ast.parse(text)):
        if is_deletable(statement):
            note(statement, "statement", "pass")
        for node in expressions(statement):
            for kind, changed in variants(node):
                note(place(node), kind, f"({ast.unparse(changed)})")
    return [found[key] for key in sorted(found)]


def drawn(root: Path, seed: str, count: int) -> list[Change]:
    """Return some changes, at most one of a line."""
    by_line: dict[tuple[str, int], list[Change]] = {}
    for room in ROOMS:
        for path in sorted((root / "gradsurgeon" / room).rglob("*.py")):
            for change in changes_of(path, str(path.relative_to(root))):
                by_line.setdefault((change.path, change.line), []).append(change)
    chance = random.Random(seed)
    places = chance.sample(sorted(by_line), count)
    return [chance.choice(by_line[where]) for where in sorted(places)]


# Which tests see it.


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def check_out(commit: str, into: Path, *paths: str) -> None:
    """Write the files of a commit, or some of them, into a folder."""
    archive = subprocess.Popen(["git", "archive", commit, *paths], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(into)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit(f"{commit} cannot be read")


def environment(folder: Path) -> dict[str, str]:
    # The package is imported from the folder, not from where it is installed.
    return os.environ | {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}


def pytest(
    folder: Path, *options: str, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        check=False,
        timeout=limit,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def tests_by_line(folder: Path) -> dict[tuple[str, int], list[str]]:
    """Return the quick tests that run each line, those that run the fewest lines first."""
    done = pytest(
        folder, "-n", "2", "--tb=no", "-rfE", "--cov", "--cov-context=test", "--cov-report="
    )
    broken = {
        line.split(" ", 1)[1].partition(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    }
    print(done.stdout[-2000:], file=sys.stderr, flush=True)  # noqa: T201
    data = coverage.CoverageData(basename=str(folder / ".coverage"))
    data.read()
    lengths: dict[str, int] = {}
    runs: dict[tuple[str, int], set[str]] = {}
    for file in data.measured_files():
        name = os.path.relpath(file, folder)
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.rpartition("|")[0] for context in contexts if context} - broken
            runs[name, line] = tests
            for test in tests:
                lengths[test] = lengths.get(test, 0) + 1
    return {
        where: sorted(tests, key=lambda test: (lengths[test], test))
        for where, tests in runs.items()
    }


def is_seen(folder: Path, change: Change, tests: Sequence[str]) -> bool:
    """Return whether one of some tests fails with a change."""
    path = folder / change.path
    lines = path.read_text().splitlines(keepends=True)
    if lines[change.line - 1].rstrip("\n") != change.before:
        raise SystemExit(f"{change.path}:{change.line} is not what was drawn")
    chosen = folder / "chosen.txt"
    chosen.write_text("".join(f"{test}\n" for test in tests[:MOST_TESTS]))
    original = path.read_text()
    lines[change.line - 1] = change.after + "\n"
    path.write_text("".join(lines))
    # Python compiles a file again only if its size or its time in seconds differs.
    os.utime(path, times=(time.time(), time.time_ns() % 10**9))
    try:
        return pytest(folder, "-x", "-n", "0", f"@{chosen}", limit=LIMIT).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)


def tried(changes: Sequence[Change], base: str, tests: str, jobs: int) -> list[dict[str, Any]]:
    """Return each change with what became of it: seen, not seen, or run by no test."""
    with tempfile.TemporaryDirectory() as name:
        first = Path(name) / "0"
        first.mkdir()
        check_out(base, first)
        shutil.rmtree(first / "tests")
        check_out(tests, first, "tests")
        runs = tests_by_line(first)
        folders: SimpleQueue[Path] = SimpleQueue()
        folders.put(first)
        for number in range(1, jobs):
            shutil.copytree(first, Path(name) / str(number))
            folders.put(Path(name) / str(number))

        def result(change: Change) -> dict[str, Any]:
            concerned = runs.get((change.path, change.line), [])
            if not concerned:
                return asdict(change) | {"result": "run by no test"}
            folder = folders.get()
            try:
                seen = is_seen(folder, change, concerned)
            finally:
                folders.put(folder)
            print(f"{change.path}:{change.line} {seen}", file=sys.stderr, flush=True)  # noqa: T201
            return asdict(change) | {"result": "seen" if seen else "not seen"}

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(result, changes))


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Print how many changes each suite sees, and those that only the first one sees."""
    for results in (before, after):
        print(sum(entry["result"] == "seen" for entry in results), "of", len(results), "seen")  # noqa: T201
    for old, new in zip(before, after, strict=True):
        if old["result"] == "seen" != new["result"]:
            print(  # noqa: T201
                f"lost: {old['path']}:{old['line']} {old['before'].strip()} -> {old['after'].strip()}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("commit")
    draw.add_argument("--count", type=int, default=200)
    attempt = commands.add_parser("try")
    attempt.add_argument("changes", type=Path)
    attempt.add_argument("--tests", required=True)
    attempt.add_argument("--jobs", type=int, default=2)
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "draw":
        seed = git("rev-parse", chosen.commit)
        with tempfile.TemporaryDirectory() as name:
            check_out(seed, Path(name), "gradsurgeon")
            changes = drawn(Path(name), seed, chosen.count)
        result: Any = {"commit": seed, "changes": [asdict(change) for change in changes]}
    elif chosen.command == "try":
        plan = json.loads(chosen.changes.read_text())
        changes = [Change(**entry) for entry in plan["changes"]]
        result = tried(changes, plan["commit"], chosen.tests, chosen.jobs)
    else:
        compare(json.loads(chosen.before.read_text()), json.loads(chosen.after.read_text()))
        return
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
