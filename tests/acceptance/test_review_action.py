"""The GitHub Action: what a review says, where it says it, and what it never does.

`cases/reviews` has transcripts, see `transcripts.py`, of a checkout. Their commands are `review`, with inputs of the
action, and `left`: the summary, the outputs, the comments, and what the API was asked. `new-base` takes what is there for
the base of the pull request.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from commands import EDITS, ROOT, environment, git, pasted
from pull_requests import ACTION, WRONG, Job, pull_request
from ranks import Json
from transcripts import in_a_shell, replayed, shown

pytestmark = pytest.mark.slow

CASES = ROOT / "tests" / "cases" / "reviews"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with pull_request(tmp_path) as one:
        yield one


def commands_of(job: Job) -> Callable[[str, Path], str]:
    """Return what runs the commands of a transcript: the review, and what it has left behind."""

    def run(line: str, path: Path) -> str:
        command, *words = shlex.split(line)
        if command in ("review", "new-base"):
            git(path, "add", "-A")
            git(path, "commit", "--allow-empty", "-qm", "x")
        if command == "new-base":
            job.base = git(path, "rev-parse", "HEAD")
            return ""
        if command == "review":
            options = [word for word in words if "=" not in word]
            inputs = dict(word.split("=", 1) for word in words if "=" in word)
            done = job.run(*options, **inputs)
            return shown(done.returncode, done.stdout, done.stderr)
        if command == "left":
            return left(job, words[0]).strip()
        return in_a_shell(line, path)

    return run


def left(job: Job, what: str) -> str:
    if what == "summary":
        return job.summary
    if what == "outputs":
        return (job.folder / "output").read_text(encoding="utf-8")
    if what == "asked":
        return "\n".join(job.github.asked)
    return "\n\n".join(f"{one['id']} {one['body']}" for one in job.github.comments)


@pytest.mark.parametrize(
    "case", [pytest.param(path, id=path.stem) for path in sorted(CASES.glob("*.txt"))]
)
def test_a_review_is_as_its_transcript(job: Job, case: Path) -> None:
    text = case.read_text(encoding="utf-8")
    assert replayed(text, job.checkout, commands_of(job)) == text


def test_the_guide_says_what_to_paste(job: Job) -> None:
    workflow = yaml.safe_load(pasted("yml").partition("# .github/workflows/rules.yml\n")[2])
    (steps,) = (one["steps"] for one in workflow["jobs"].values())
    review, upload = steps[1], steps[2]
    known = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))["inputs"]
    assert set(review["with"]) <= set(known)
    assert review["uses"].partition("/")[2].partition("@")[0] == ".github/actions/review"
    assert workflow["permissions"]["security-events"] == "write"
    job.write({"rules.yaml": WRONG})
    done = job.run(**{name.replace("-", "_"): value for name, value in review["with"].items()})
    assert done.returncode == 1, done.stderr
    sarif = json.loads((job.checkout / upload["with"]["sarif_file"]).read_text(encoding="utf-8"))
    assert [one["ruleId"] for one in sarif["runs"][0]["results"]] == ["unknown-action"]


TESTS = {
    "rules.yaml": EDITS,
    "rules.test.yaml": """version: 1
params: params.json
tests:
  - {rule: no-bias, matches: 1}
  - {rule: no-bias, gradient: [3.0], expect: [0.0]}
""",
}


def test_the_tests_of_rules_are_run_and_those_that_need_torch_left_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(TESTS)
    assert job.run().returncode == 0
    assert "The tests of the rules pass: 2 tests: 0 failed." in job.summary
    # The action installs no torch.
    (job.folder / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
    places = {"PYTHONPATH": f"{job.folder}{os.pathsep}{ROOT}"}
    monkeypatch.setattr("pull_requests.environment", lambda: {**environment(), **places})
    done = job.run()
    assert done.returncode == 0, done.stdout
    assert "need no PyTorch pass: 2 tests: 0 failed; 1 not run." in job.summary
    job.write({"rules.test.yaml": TESTS["rules.test.yaml"].replace("matches: 1", "matches: 2")})
    assert job.run().returncode == 1
    assert "it matches 1, not 2" in job.summary


def test_the_comment_is_found_on_a_later_page_and_only_among_bots(job: Job) -> None:
    job.write({"rules.yaml": WRONG})
    job.run()
    (mine,) = job.github.comments
    forged = {"id": 1, "body": mine["body"], "user": {"type": "User"}}
    job.github.comments[:] = [{**forged, "id": i + 1} for i in range(150)]
    job.github.comments.append({"id": 151, "body": mine["body"], "user": {"type": "Bot"}})
    job.run(fail_on="never")
    assert job.github.asked[-1] == "PATCH /repos/me/net/issues/comments/151"


def test_a_token_that_may_only_read_is_no_failure(job: Job) -> None:
    job.github.readonly = True
    job.write({"rules.yaml": EDITS})
    done = job.run()
    assert done.returncode == 0
    assert "::notice title=gradsurgeon::No comment was written (the token may only read" in (
        done.stdout
    )
    assert job.github.asked[-1].startswith("POST")
    assert job.github.comments == []
    assert "`rules.yaml`" in job.summary


def test_an_api_that_cannot_be_reached_is_no_failure(job: Job) -> None:
    job.github.url = "http://127.0.0.1:9"
    job.write({"rules.yaml": EDITS})
    done = job.run()
    assert done.returncode == 0
    assert "::warning title=gradsurgeon::No comment was written" in done.stdout


def test_a_shallow_checkout_fetches_the_base(job: Job) -> None:
    job.write({"rules.yaml": EDITS})
    whole = job.folder / "whole"
    job.checkout.rename(whole)
    git(job.folder, "clone", "-q", "--depth=1", whole.as_uri(), "checkout")
    git(whole, "config", "uploadpack.allowAnySHA1InWant", "true")
    assert job.run().returncode == 0
    assert job.outputs["changed"] == "true"
    job.base = "0" * 40
    done = job.run()
    assert (done.returncode, "cannot be fetched: check out with" in done.stdout) == (2, True)


def test_a_long_review_is_cut_in_the_comment_at_the_end_of_a_line(job: Job) -> None:
    rule = '  - {id: a-%d, action: norm-log, params: "*", nope: 1}\n'
    many = "version: 1\nrules:\n" + "".join(rule % i for i in range(150))
    job.write({f"{'x' * 200}/{i}/rules.yaml": many for i in range(4)})
    job.run()
    body = job.github.comments[0]["body"]
    assert 50_000 < len(body) < 65_536
    assert "\n```\n\nThe rest is left out here" in body
    assert len(job.summary) > 100_000
    assert "left out" not in job.summary


class TestDefinition:
    text = (ACTION / "action.yml").read_text(encoding="utf-8")
    data: Json = yaml.safe_load(text)

    def test_no_expression_stands_in_the_text_of_a_shell(self) -> None:
        for step in self.data["runs"]["steps"]:
            assert "${{" not in step["run"]

    def test_every_action_that_is_used_is_pinned(self) -> None:
        used = [step["uses"] for step in self.data["runs"]["steps"] if "uses" in step]
        assert all(re.search("@[0-9a-f]{40}$", one) for one in used)

    def test_every_input_reaches_the_script(self) -> None:
        env = self.data["runs"]["steps"][-1]["env"]
        assert env == {
            f"INPUT_{name.upper().replace('-', '_')}": f"${{{{ inputs.{name} }}}}"
            for name in self.data["inputs"]
        }
        assert list(self.data["outputs"]) == ["changed", "markdown-file"]

    def test_it_knows_rule_files_by_the_names_that_the_hooks_know(self) -> None:
        hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
        script = (ACTION / "review.py").read_text(encoding="utf-8")
        rules, tests = re.findall(r'^\w+_FILE = re\.compile\(r"(.*)\$"\)$', script, re.MULTILINE)
        *lints, test = [hook["files"] for hook in hooks]
        assert lints == [f"{rules}$"] * 2
        # It runs when rules change, or what their tests read.
        assert test.startswith(f"({tests}|{rules}|")


def test_the_script_runs_on_no_more_than_python(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "GITHUB_EVENT_NAME": "push"}
    script = [sys.executable, "-I", "-S", str(ACTION / "review.py"), "--only-refuse"]
    assert subprocess.run(script, env=env, cwd=tmp_path, check=False).returncode == 0
