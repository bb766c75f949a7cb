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
TEST_FILE = re.compile(r"\.test\.yaml$")
# The summary of `gradsurgeon test` where tests with a gradient are not run: this action installs no PyTorch.
LACKS_TORCH = re.compile(r"\d+ tests?: 0 failed; \d+ not run")
_NO_CHANGE = "No rule file of this pull request does anything else than at its base."
_NO_PARAMS = (
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
    has_problems: bool = False
    lacks_names: bool = False
    exit_code: int = 0


def main() -> int:
    try:
        refuse()
        if sys.argv[1:] == ["--only-refuse"]:
            return 0
        check_inputs()
        review = review_rule_files()
        text = "\n".join(review.lines) + "\n"
        file = write_results(text, changed=review.changed)
        comment(text, review)
    except ReviewError as error:
        annotate("error", str(error))
        return 2
    print(f"The review: {file}")
    return review.exit_code


def refuse() -> None:
    """Stop under `pull_request_target`: such a job can write to the repository while it reads the files of a stranger."""
    if os.environ.get("GITHUB_EVENT_NAME") == "pull_request_target":
        raise ReviewError(
            "gradsurgeon does not review under `pull_request_target`: there a job that checked out "
            "the pull request would run its code with a token that can write. Use `on: "
            "pull_request`; for forks the review is in the job summary"
        )


def check_inputs() -> None:
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


# -- reviewing ------------------------------------------------------------------------------------


def review_rule_files() -> Review:
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
    run_tests(review)
    if not base:
        review.lines += ["There is nothing to compare with: this is no pull request.", ""]
        return review
    for file in sorted({*now, *before}.difference(linked)):
        review.lines += compare(file, base, now, before, review)
    if not review.changed:
        review.lines.append(_NO_CHANGE)
    elif review.lacks_names:
        review.lines.append(_NO_PARAMS)
    return review


def leads_out(file: str) -> bool:
    """Tell whether a path leaves the checkout through a link, or leads into `.git`, which may hold a token."""
    top = Path.cwd().resolve()
    try:
        path = Path(file).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return True
    return not path.is_relative_to(top) or ".git" in path.relative_to(top).parts


def refuse_link(file: str, review: Review) -> None:
    """Report that a rule file is not read, because it links to something that is not under review."""
    told = "it leads out of the checkout, so it is not read: put the rules into the file itself"
    annotate("error", f"{inline(file)}: {told}")
    review.lines += [f"### {inline(file)}", "", f"This file cannot be reviewed: {told}.", ""]
    review.changed, review.has_problems, review.exit_code = True, True, 2


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


def beside(file: str, name: str) -> str:
    """Return the path of a file beside a rule file, empty if there is none in the checkout."""
    path = str(Path(file).with_name(name))
    return path if Path(path).is_file() and not leads_out(path) else ""


def run_tests(review: Review) -> None:
    """Run the tests of rules in the checkout, and list those that fail."""
    tracked = [file for file in git("ls-files", "-z").split("\0") if TEST_FILE.search(file)]
    files = [file for file in tracked if os.path.lexists(file) and not leads_out(file)]
    if not files:
        return
    done = gradsurgeon("test", "--", *files)
    summary = done.stderr.strip()
    if not done.returncode:
        review.lines += [f"The tests of the rules pass: {summary}.", ""]
        return
    if LACKS_TORCH.fullmatch(summary):
        review.lines += [f"The tests of the rules that need no PyTorch pass: {summary}.", ""]
        return
    annotate("error", "tests of the rules fail, or cannot be run: see the review")
    told = done.stdout + done.stderr
    review.lines += ["### Tests of the rules", "", *fenced(told), ""]
    review.has_problems = True
    review.exit_code = max(review.exit_code, done.returncode)


def lint(files: list[str], review: Review) -> None:
    """Annotate the problems of files and list them in the review."""
    names: tuple[str, ...] = ()
    if given("params"):
        names = ("--params", given("params"))
    elif any(beside(file, "params.json") for file in files):
        names = ("--params-beside",)
    options = ("--format", "github", "--fail-on", given("fail-on"), *names)
    done = gradsurgeon("lint", *options, "--", *files)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    sys.stderr.write(done.stderr)
    review.exit_code = done.returncode
    if given("sarif-file"):
        options = ("--format", "sarif", "--fail-on", "never", *names)
        options = (*options, "--output", given("sarif-file"))
        written = gradsurgeon("lint", *options, "--", *files)
        if not Path(given("sarif-file")).exists():
            raise ReviewError(f"SARIF could not be written: {written.stderr.strip()}")
    problems = gradsurgeon("lint", "--format", "concise", *names, "--", *files).stdout
    if problems:
        # A note that stands there for long is no reason for a comment on every pull request.
        review.has_problems = bool(re.search(r":\d+:\d+: (error|warning): ", problems))
        heading = "### Problems" if review.has_problems else "### Notes"
        review.lines += [heading, "", *fenced(problems), ""]
    else:
        single = len(files) == 1
        checked = "1 rule file was" if single else f"{len(files)} rule files were"
        them = "it" if single else "them"
        review.lines += [f"{checked} checked: nothing is wrong with {them}.", ""]


def compare(
    file: str, base: str, now: list[str], before: list[str], review: Review
) -> Iterator[str]:
    """Yield what changed in a file: its effect, if the parameters of the model are known."""
    heading = [f"### {inline(file)}", ""]
    if file not in now:
        review.changed = True
        yield from (*heading, "The file is removed, with all its rules.", "")
        return
    names = given("params") or beside(file, "params.json")
    params = ("--params", names) if names else ()
    norms = beside(file, "norms.json")
    if norms:
        # The file also has the names of the model.
        params = (*params, "--on", norms)
    if file not in before:
        review.changed = True
        yield from (*heading, "The file is new.", "")
        if params:
            done = gradsurgeon("plan", *params, "--", file)
            yield from (*fenced(done.stdout or done.stderr), "")
        review.lacks_names |= not params
        return
    if not params:
        if git("diff", "--name-only", base, "--", f":(literal,top){file}"):
            review.changed = True
            review.lacks_names = True
            yield from (*heading, "The file differs.", "")
        return
    options = (*params, "--format", "markdown", "--exit-code")
    done = gradsurgeon("diff", *options, "--", f"{base}:{file}", file)
    if done.returncode == 1 and done.stdout:
        review.changed = True
        yield from (*heading, done.stdout.rstrip(), "")
    elif done.returncode:
        review.changed, review.has_problems = True, True
        told = (
            "What the change does cannot be shown: the file cannot be read as it is, or as it was."
        )
        yield from (*heading, told, "", *fenced(done.stderr), "")


def base_commit() -> str:
    """Return the commit to compare with; empty if there is none."""
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
    """Return the commit that a name stands for; empty if there is none."""
    options = ("--verify", "--quiet", "--end-of-options")
    return git("rev-parse", *options, f"{name}^{{commit}}", check=False).strip()


def pull_request() -> dict[str, Any]:
    """Return what the event says about the pull request; empty if it is about something else."""
    path = os.environ.get("GITHUB_EVENT_PATH")
    event = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    request = event.get("pull_request") if isinstance(event, dict) else None
    return request if isinstance(request, dict) else {}


def git(*arguments: str, check: bool = True) -> str:
    """Return what git prints; an empty text where it fails and ``check`` is off."""
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


# -- reporting ------------------------------------------------------------------------------------


def annotate(word: str, message: str) -> None:
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    print(f"::{word} title=gradsurgeon::{text}", flush=True)


def fenced(text: str) -> list[str]:
    """Return text as a code block, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text.rstrip(), fence]


def inline(text: str) -> str:
    """Return text as code within a line."""
    shown = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"`{shown}`"


def write_results(text: str, *, changed: bool) -> Path:
    """Write the review to a file, to the job summary and to the outputs; return the file."""
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
    """Return as many whole lines as fit, with a note if some were left out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    kept = text[:limit].rpartition("\n")[0]
    fences = re.findall("^(`{3,})(?:text|diff)?$", kept, flags=re.MULTILINE)
    if len(fences) % 2:
        kept += f"\n{fences[-1]}"
    return f"{kept}\n\nThe rest is left out here: it is too long. See the output `markdown-file`.\n"


# -- the comment ----------------------------------------------------------------------------------


def comment(text: str, review: Review) -> None:
    """Update the comment of an earlier run, or write one. A token that may not is no failure."""
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
        elif mode == "always" or review.changed or review.has_problems:
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
