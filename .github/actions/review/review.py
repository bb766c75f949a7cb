"""Review the rule files of a pull request: annotations, job summary, one comment kept up to date.

Runs nothing of the pull request: git shows its files, `gradsurgeon lint`, `diff` and `plan` read
them as data. Needs nothing but the standard library and an installed gradsurgeon.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# At the end, where it stands in for no other module: Python was started without this folder.
sys.path.append(str(Path(__file__).parent))
from github_comments import ask, own_comment  # found by the line above

# As in `.pre-commit-hooks.yaml`.
RULE_FILE = re.compile(r"(^|/)(gradsurgeon|rules|[^/]*\.gradsurgeon)\.ya?ml$")
_SAME = "No rule file of this pull request does anything else than at its base."
_UNTOLD = (
    "What this does to the model is not shown, because its parameters are not known: give the action "
    "`params`, a file that `gradsurgeon params` writes."
)
_MAX_COMMENT = 60_000  # characters; GitHub takes 65,536
_MAX_SUMMARY = 900_000  # bytes; GitHub takes 1 MiB
_SECONDS = 600  # for one command
_CHOICES = {"comment": ("auto", "always", "never"), "fail-on": ("error", "warning", "never")}


class ReviewError(Exception):
    """The review cannot be done; the text says why and what to do."""


@dataclass
class Review:
    """What there is to say, and what it means for the job."""

    lines: list[str] = field(default_factory=list)
    changed: bool = False
    wrong: bool = False
    code: int = 0


def main() -> int:
    """Review, tell, and return the exit code of the job step."""
    try:
        refuse()
        if sys.argv[1:] == ["--only-refuse"]:
            return 0
        check_inputs()
        review = look()
        text = "\n".join(review.lines) + "\n"
        where = tell(text, changed=review.changed)
        comment(text, review)
    except ReviewError as error:
        annotate("error", str(error))
        return 2
    print(f"The review: {where}")
    return review.code


def refuse() -> None:
    """Stop where a job may write to the repository while it looks at the code of a stranger."""
    if os.environ.get("GITHUB_EVENT_NAME") == "pull_request_target":
        raise ReviewError(
            "gradsurgeon does not review under `pull_request_target`: there a job that checked out "
            "the pull request would run its code with a token that can write. Use `on: "
            "pull_request`; for forks the review is in the job summary"
        )


def check_inputs() -> None:
    """Stop where an input is none of its choices, or names what is not there."""
    for name, known in _CHOICES.items():
        if given(name) not in known:
            raise ReviewError(f"`{name}: {given(name)}` is not known: use {', '.join(known)}")
    if (params := given("params")) and not Path(params).is_file():
        raise ReviewError(
            f"`params: {params[:80]}` is no file of this checkout: write it with `gradsurgeon params` "
            "and commit it, or leave the input out"
        )
    for name in ("params", "sarif-file"):
        if (file := given(name)) and leads_out(file):
            raise ReviewError(
                f"`{name}: {file[:80]}` leads out of this checkout: name a file in it"
            )


def given(name: str) -> str:
    """Return an input of the action, or its default."""
    text = os.environ.get(f"INPUT_{name.upper().replace('-', '_')}", "").strip()
    return text or {"comment": "auto", "fail-on": "error"}.get(name, "")


# -- looking --------------------------------------------------------------------------------------


def look() -> Review:
    """Return what there is to say on the rule files."""
    base = base_commit()
    now, before = rule_files(base)
    review = Review(["## gradsurgeon review", ""])
    linked = [file for file in now if leads_out(file)]
    now = [file for file in now if file not in linked]
    if not now and not before and not linked:
        review.lines.append("There are no rule files here.")
        return review
    if now:
        lint(now, review)
    for file in linked:
        refuse_link(file, review)
    if not base:
        review.lines += ["There is nothing to compare with: this is no pull request.", ""]
        return review
    for file in sorted({*now, *before}.difference(linked)):
        review.lines += compare(file, base, now, before, review)
    if not review.changed:
        review.lines.append(_SAME)
    elif not given("params"):
        review.lines.append(_UNTOLD)
    return review


def leads_out(file: str) -> bool:
    """Tell whether a path is none of the checkout: links lead anywhere, and `.git` may hold a token."""
    top = Path.cwd().resolve()
    try:
        path = Path(file).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return True
    return not path.is_relative_to(top) or ".git" in path.relative_to(top).parts


def refuse_link(file: str, review: Review) -> None:
    """Say that a rule file is not read, because what it leads to is not under review."""
    told = "it leads out of the checkout, so it is not read: put the rules into the file itself"
    annotate("error", f"{inline(file)}: {told}")
    review.lines += [f"### {inline(file)}", "", f"This file cannot be reviewed: {told}.", ""]
    review.changed, review.wrong, review.code = True, True, 2


def rule_files(base: str) -> tuple[list[str], list[str]]:
    """Return the rule files in the checkout, and those of the base."""
    named = [line.strip() for line in given("files").splitlines() if line.strip()]
    at_base = git("ls-tree", "-r", "-z", "--name-only", "--full-tree", base) if base else ""
    before = [file for file in at_base.split("\0") if file]
    if named:
        gone = [file for file in named if not os.path.lexists(file) and file in before]
        return [file for file in named if file not in gone], [f for f in named if f in before]
    tracked = [file for file in git("ls-files", "-z").split("\0") if RULE_FILE.search(file)]
    now = [file for file in tracked if os.path.lexists(file)]
    return now, [file for file in before if RULE_FILE.search(file)]


def lint(files: list[str], review: Review) -> None:
    """Annotate what is wrong with files and list it."""
    done = gradsurgeon("lint", "--format", "github", "--fail-on", given("fail-on"), "--", *files)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    sys.stderr.write(done.stderr)
    review.code = done.returncode
    if given("sarif-file"):
        options = ("--format", "sarif", "--fail-on", "never", "--output", given("sarif-file"))
        written = gradsurgeon("lint", *options, "--", *files)
        if not Path(given("sarif-file")).exists():
            raise ReviewError(f"SARIF could not be written: {written.stderr.strip()}")
    found = gradsurgeon("lint", "--format", "concise", "--", *files)
    if found.stdout:
        # A note that stands there for long is no reason for a comment on every pull request.
        review.wrong = bool(re.search(r":\d+:\d+: (error|warning): ", found.stdout))
        heading = "### Problems" if review.wrong else "### Notes"
        review.lines += [heading, "", *fenced(found.stdout), ""]
    else:
        one = len(files) == 1
        checked = "1 rule file was" if one else f"{len(files)} rule files were"
        review.lines += [f"{checked} checked: nothing is wrong with {'it' if one else 'them'}.", ""]


def compare(
    file: str, base: str, now: list[str], before: list[str], review: Review
) -> Iterator[str]:
    """Yield what changed in a file, in effect where the model's parameters are known."""
    heading = [f"### {inline(file)}", ""]
    if file not in now:
        review.changed = True
        yield from (*heading, "The file is removed, with all its rules.", "")
        return
    params = ("--params", given("params")) if given("params") else ()
    if file not in before:
        review.changed = True
        yield from (*heading, "The file is new.", "")
        if params:
            done = gradsurgeon("plan", *params, "--", file)
            yield from (*fenced(done.stdout or done.stderr), "")
        return
    if not params:
        if git("diff", "--name-only", base, "--", f":(literal,top){file}"):
            review.changed = True
            yield from (*heading, "The file differs.", "")
        return
    options = (*params, "--format", "markdown", "--exit-code")
    done = gradsurgeon("diff", *options, "--", f"{base}:{file}", file)
    if done.returncode == 1 and done.stdout:
        review.changed = True
        yield from (*heading, done.stdout.rstrip(), "")
    elif done.returncode:
        review.changed, review.wrong = True, True
        told = (
            "What the change does cannot be shown: the file cannot be read as it is, or as it was."
        )
        yield from (*heading, told, "", *fenced(done.stderr), "")


def base_commit() -> str:
    """Return the commit to compare with; empty where there is none."""
    wanted = given("base-ref") or pull_request().get("base", {}).get("sha", "")
    if not wanted:
        return ""
    for name in (wanted, f"origin/{wanted}"):
        if commit := commit_of(name):
            return commit
    # A shallow checkout has the merge only.
    git("fetch", "--quiet", "--depth=1", "--end-of-options", "origin", wanted, check=False)
    commit = commit_of(wanted) or commit_of("FETCH_HEAD")
    if not commit:
        raise ReviewError(
            f"the base {wanted[:80]} is not in this checkout and cannot be fetched: check out with "
            "`fetch-depth: 0`, or name what to compare with as `base-ref`"
        )
    return commit


def commit_of(name: str) -> str:
    """Return the commit that a name stands for; empty where there is none."""
    options = ("--verify", "--quiet", "--end-of-options")
    return git("rev-parse", *options, f"{name}^{{commit}}", check=False).strip()


def pull_request() -> dict[str, Any]:
    """Return what the event that started the workflow says of a pull request."""
    path = os.environ.get("GITHUB_EVENT_PATH")
    event = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    found = event.get("pull_request") if isinstance(event, dict) else None
    return found if isinstance(found, dict) else {}


def git(*arguments: str, check: bool = True) -> str:
    """Return what git prints; nothing where it fails and that is no fault."""
    done = run("git", *arguments)
    if check and done.returncode:
        raise ReviewError(f"`git {arguments[0]}` failed: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout


def gradsurgeon(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed gradsurgeon, not a folder of that name in the checkout."""
    return run(sys.executable, "-P", "-m", "gradsurgeon", *arguments)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without a shell, and without the token."""
    env = {key: value for key, value in os.environ.items() if key != "INPUT_TOKEN"}
    try:
        return subprocess.run(
            arguments,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            env=env,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        shown = " ".join(arguments[:5])
        raise ReviewError(f"`{shown} ...` took more than {_SECONDS} seconds") from None


# -- telling --------------------------------------------------------------------------------------


def annotate(word: str, message: str) -> None:
    """Print a workflow command."""
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    print(f"::{word} title=gradsurgeon::{text}", flush=True)


def fenced(text: str) -> list[str]:
    """Return text as a block that nothing inside it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text.rstrip(), fence]


def inline(text: str) -> str:
    """Return text as code inside a line, whatever it holds."""
    shown = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"`{shown}`"


def tell(text: str, *, changed: bool) -> Path:
    """Write the review, the job summary and the outputs; return where the review stands."""
    folder = os.environ.get("RUNNER_TEMP") or tempfile.gettempdir()
    file = Path(folder) / "gradsurgeon-review.md"
    raw = text.encode("utf-8", "backslashreplace")
    file.write_bytes(raw)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        whole = len(raw) <= _MAX_SUMMARY
        with Path(summary).open("ab") as stream:
            stream.write(raw if whole else shortened(text, _MAX_SUMMARY // 4).encode())
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as stream:
            stream.write(f"changed={str(changed).lower()}\nmarkdown-file={file}\n")
    return file


def shortened(text: str, limit: int) -> str:
    """Return as many whole lines as fit, and say that more were left out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    kept = text[:limit].rpartition("\n")[0]
    fences = re.findall("^(`{3,})(?:text)?$", kept, flags=re.MULTILINE)
    if len(fences) % 2:
        kept += f"\n{fences[-1]}"
    return f"{kept}\n\nThe rest is left out here: it is too long. See the output `markdown-file`.\n"


# -- the comment ----------------------------------------------------------------------------------


def comment(text: str, review: Review) -> None:
    """Update the comment of this review or write one. That it may not is no failure."""
    number = pull_request().get("number")
    mode, token = given("comment"), given("token")
    if mode == "never" or not isinstance(number, int) or not token:
        return
    # One comment for each use of the action in a pull request.
    use = hashlib.sha256(f"{given('files')}\0{given('params')}".encode()).hexdigest()[:12]
    marker = f"<!-- gradsurgeon review {use} -->"
    body = {"body": f"{marker}\n{shortened(text, _MAX_COMMENT)}"}
    issues = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    try:
        if (known := own_comment(f"{issues}/{number}/comments", marker, token)) is not None:
            ask("PATCH", f"{issues}/comments/{known}", token, body)
        elif mode == "always" or review.changed or review.wrong:
            ask("POST", f"{issues}/{number}/comments", token, body)
    except urllib.error.HTTPError as error:
        why = f"HTTP status {error.code}"
        if error.code in (401, 403, 404):
            why = "the token may only read, as for forks"
        elif error.headers.get("Location"):
            why += ": the token is not sent to where that leads"
        annotate("notice", f"No comment was written ({why}): the review is in the job summary")
    except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
        annotate("warning", f"No comment was written ({error}): the review is in the job summary")


if __name__ == "__main__":
    sys.exit(main())
