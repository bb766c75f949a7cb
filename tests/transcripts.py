"""Transcripts of commands: what is typed, what is printed on both streams, and how it ends.

A transcript has a sentence, then files (`== NAME`, and their text) and commands (`$ ...`, and what comes of them) in
their order. Lines of stderr begin with `2> `, and come after those of stdout; the last line has the exit status if it
is not 0, as `[2]`. `...` stands for any text of a line, and alone for any number of lines. `HERE` is the folder,
`REPOSITORY` this checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from commands import ROOT, environment


def replayed(text: str, path: Path, run: Callable[[str, Path], str]) -> str:
    """Do what a transcript says; return it with the output of today where that is another one."""
    here = str(path)
    done = []
    for part in re.split(r"^(?=== |\$ )", text, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        name = head[3:]
        if head.startswith("== "):
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{body.rstrip()}\n".replace("HERE", here), encoding="utf-8")
        if not head.startswith("$ "):
            done.append(part)
            continue
        line = head[2:].replace("HERE", here).replace("REPOSITORY", str(ROOT))
        printed = run(line, path).replace(here, "HERE")
        expected = body.strip("\n")
        if fits(expected, printed):
            done.append(part)
        else:
            done.append(f"{head}\n{merged(expected, printed)}\n\n")
    return f"{''.join(done).rstrip()}\n"


def in_a_shell(line: str, path: Path) -> str:
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=path,
        env={**environment(), "PATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    return shown(done.returncode, done.stdout, done.stderr)


def shown(code: int, out: str, err: str) -> str:
    lines = out.rstrip().splitlines()
    lines += [f"2> {line}".rstrip() for line in err.splitlines()]
    if code:
        lines.append(f"[{code}]")
    return "\n".join(lines).strip("\n")


def merged(expected: str, printed: str) -> str:
    """Return what is printed, with the expected lines in the place of those that they still fit."""
    old = expected.split("\n")
    new = printed.split("\n")
    # By how many lines of either are left: the number of lines that do not fit, and the lines.
    best: dict[tuple[int, int], tuple[int, list[str]]] = {(0, 0): (0, [])}
    for left in range(len(old) + 1):
        for right in range(len(new) + 1):
            ways = []
            if left:
                cost, lines = best[left - 1, right]
                is_any = is_any_number(old[left - 1])
                ways.append((cost, [*lines, old[left - 1]]) if is_any else (cost + 1, lines))
            if right:
                cost, lines = best[left, right - 1]
                is_any = left > 0 and is_any_number(old[left - 1])
                ways.append((cost, lines) if is_any else (cost + 1, [*lines, new[right - 1]]))
            if left and right and fits(old[left - 1], new[right - 1]):
                cost, lines = best[left - 1, right - 1]
                ways.append((cost, [*lines, old[left - 1]]))
            if ways:
                best[left, right] = min(ways, key=lambda way: way[0])
    return "\n".join(best[len(old), len(new)][1])


def is_any_number(line: str) -> bool:
    return line in ("...", "2> ...")


def fits(expected: str, printed: str) -> bool:
    pattern = ""
    for line in expected.split("\n"):
        if is_any_number(line):
            pattern += rf"(?:{line[:-3].rstrip()}.*\n)*?"
        else:
            pattern += re.escape(line).replace(r"\.\.\.", ".*") + "\n"
    return re.fullmatch(pattern, f"{printed}\n") is not None
