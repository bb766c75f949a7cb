"""The GitHub Action: what a review says, where it says it, and what it never does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from commands import CLEAN, EDITS, ROOT, git, pasted
from pull_requests import ACTION, WRONG, Job, pull_request
from ranks import Json

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with pull_request(tmp_path) as one:
        yield one


def test_a_comment_is_written_once_and_then_kept_up_to_date(job: Job) -> None:
    job.github.comments += [
        {"id": 1, "body": "hello", "user": {"type": "User"}},
        {"id": 2, "body": "", "user": {"type": "Bot"}},
    ]
    job.write({"rules.yaml": WRONG})
    done = job.run()
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error file=rules.yaml,line=3,col=25,")
    assert len(job.github.comments) == 3
    first = job.github.comments[2]["body"]
    marker, _, shown = first.partition("\n")
    assert re.fullmatch("<!-- gradsurgeon review [0-9a-f]{12} -->", marker)
    assert "unknown action `norm-lg`" in shown
    assert shown == job.summary
    assert job.outputs["changed"] == "true"
    assert Path(job.outputs["markdown-file"]).read_text(encoding="utf-8") == shown
    job.write({"rules.yaml": CLEAN})
    assert job.run().returncode == 0
    assert len(job.github.comments) == 3
    assert job.github.comments[2]["body"].startswith(marker)
    assert "unknown action" not in job.github.comments[2]["body"]
    assert job.outputs["changed"] == "false"
    assert [one["body"] for one in job.github.comments[:2]] == ["hello", ""]


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


@pytest.mark.parametrize(
    ("mode", "changed", "comments"),
    [("auto", False, 0), ("always", False, 1), ("auto", True, 1), ("never", True, 0)],
)
def test_when_there_is_a_comment(job: Job, mode: str, changed: bool, comments: int) -> None:
    if changed:
        job.write({"rules.yaml": EDITS})
    assert job.run(comment=mode).returncode == 0
    assert len(job.github.comments) == comments
    assert job.outputs["changed"] == str(changed).lower()
    assert bool(job.github.asked) is (mode != "never")
    assert job.summary.startswith("## gradsurgeon review\n")


@pytest.mark.parametrize("arguments", [(), ("--only-refuse",)])
def test_it_refuses_where_strangers_could_use_the_token(
    job: Job, arguments: tuple[str, ...]
) -> None:
    job.write({"rules.yaml": WRONG})
    done = job.run(*arguments, event="pull_request_target")
    assert done.returncode == 2
    assert done.stdout.startswith(
        "::error title=gradsurgeon::gradsurgeon does not review under `pull_request_target`"
    )
    assert done.stdout.count("\n") == 1
    assert (job.github.asked, job.summary, job.outputs) == ([], "", {})


def test_nothing_of_the_checkout_is_imported(job: Job) -> None:
    harm = "import pathlib; pathlib.Path('harm').touch()\n"
    job.write(
        {
            "rules.yaml": EDITS,
            "gradsurgeon/__init__.py": harm,
            "yaml.py": harm,
            "json.py": harm,
            "sitecustomize.py": harm,
        }
    )
    assert job.run().returncode == 0
    assert "`rules.yaml`" in job.summary
    assert not (job.checkout / "harm").exists()


def test_files_are_found_by_name_or_given(job: Job) -> None:
    names = ["gradsurgeon.yml", "a/b.gradsurgeon.yaml", "my-rules.yaml", "a/rules.yml.txt"]
    job.write(dict.fromkeys(names, WRONG))
    done = job.run()
    found = re.findall("^::error file=([^,]*)", done.stdout, flags=re.MULTILINE)
    assert sorted(found) == ["a/b.gradsurgeon.yaml", "gradsurgeon.yml"]
    done = job.run(files="my-rules.yaml\n  rules.yaml\n")
    assert re.findall("^::error file=([^,]*)", done.stdout, flags=re.MULTILINE) == ["my-rules.yaml"]
    assert "### `my-rules.yaml`\n\nThe file is new.\n" in job.summary
    job.write({"rules.yaml": EDITS})
    git(job.checkout, "rm", "-q", "rules.yaml")
    job.run(files="rules.yaml")
    assert "### `rules.yaml`\n\nThe file is removed" in job.summary
    done = job.run(files="nowhere.yaml", fail_on="never")
    assert (done.returncode, "[unreadable-file]" in job.summary) == (2, True)


def test_what_fails_is_chosen(job: Job) -> None:
    job.write({"rules.yaml": CLEAN.replace("norm-log", "scale, factor: 0")})
    assert [job.run(fail_on=one).returncode for one in ("error", "warning")] == [0, 1]
    done = job.run(fail_on="errors")
    assert done.returncode == 2
    assert "`fail-on: errors` is not known: use error, warning, never" in done.stdout


def test_sarif_is_written_where_it_is_asked_for(job: Job) -> None:
    job.write({"rules.yaml": WRONG})
    job.run(sarif_file="out.sarif")
    (result,) = json.loads((job.checkout / "out.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "unknown-action"
    done = job.run(sarif_file="no/such/out.sarif")
    assert (done.returncode, "SARIF could not be written" in done.stdout) == (2, True)


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


def test_names_and_texts_cannot_leave_their_place_in_the_comment(job: Job) -> None:
    name = "``` <img src=x> @all/rules.yaml"
    job.write({name: CLEAN.replace("norm-log", '"```\\n# heading @all"')})
    job.run()
    lines = job.summary.splitlines()
    assert f"### ```` {name} ````" in lines
    start, end = [i for i, line in enumerate(lines) if line.startswith("````")]
    assert any("@all" in line for line in lines[start:end])
    assert not any(
        "@all" in line for line in lines[:start] + lines[end:] if not line.startswith("### ````")
    )


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


def test_the_change_in_effect_is_shown_where_the_parameters_are_known(job: Job) -> None:
    bound = (
        CLEAN + '  - {id: bound, action: clip-norm, params: "%s", per: parameter, max_norm: %s}\n'
    )
    job.write({"rules.yaml": bound % ("*.weight", "1.0")})
    job.base = git(job.checkout, "rev-parse", "HEAD")
    zero = '  - {id: no-bias, action: zero, params: "*.bias"}\n'
    job.write({"rules.yaml": bound % ("*", "2.0") + zero})
    done = job.run(params="params.json")
    assert done.returncode == 0, done.stdout
    assert job.outputs["changed"] == "true"
    lines = job.summary.splitlines()
    assert "### `rules.yaml`" in lines
    assert "1 added, 0 removed, 1 changed; 2 of 2 parameters under rules" in job.summary
    # Before and after: the parameters that the rule acts on, and the numbers in them.
    assert "+ no-bias  zero on 0 -> 1 parameters (0 -> 2 elements)" in lines
    assert "! bound  clip-norm on 1 -> 2 parameters (6 -> 8 elements)" in lines
    assert "      max_norm: 1.0 -> 2.0" in lines
    assert "      now:    no-bias -> norms -> bound" in lines
    (comment,) = job.github.comments
    assert comment["body"].partition("\n")[2] == job.summary

    job.write({"rules.yaml": bound % ("*.weight", "1.0")})
    job.run(params="params.json")
    assert job.outputs["changed"] == "false"
    assert job.github.comments == [comment]
    assert "```" not in comment["body"]
    assert "No rule file of this pull request does anything else" in comment["body"]


def test_a_comment_in_a_rule_file_is_no_change_in_effect(job: Job) -> None:
    job.write({"rules.yaml": "# the same\n" + CLEAN})
    assert job.run(params="params.json").returncode == 0
    assert job.outputs["changed"] == "false"
    assert job.github.comments == []
    # Nobody can tell that without the parameters.
    job.run()
    assert job.outputs["changed"] == "true"


def test_new_and_removed_files_are_told_with_what_they_bind(job: Job) -> None:
    job.write({"gan.gradsurgeon.yaml": EDITS})
    git(job.checkout, "rm", "-q", "rules.yaml")
    assert job.run(params="params.json").returncode == 0
    assert "### `gan.gradsurgeon.yaml`\n\nThe file is new.\n\n```text\nplan: " in job.summary
    assert re.search(r"no-bias +zero +backward .* 1 parameter +2 +all", job.summary)
    assert "### `rules.yaml`\n\nThe file is removed, with all its rules.\n" in job.summary
    assert "\n\n\n" not in job.summary


def test_notes_alone_are_no_reason_for_a_comment(job: Job) -> None:
    job.write({"rules.yaml": EDITS})
    job.base = git(job.checkout, "rev-parse", "HEAD")
    assert job.run(params="params.json").returncode == 0
    assert re.search(r"### Notes\n\n```text\nrules.yaml:4:\d+: note: ", job.summary)
    assert job.github.comments == []
    job.write({"rules.yaml": CLEAN.replace("norm-log", "scale, factor: 0")})
    job.base = git(job.checkout, "rev-parse", "HEAD")
    assert job.run(params="params.json").returncode == 0
    assert "### Problems\n" in job.summary
    assert len(job.github.comments) == 1


def test_one_sentence_says_what_is_missing_where_the_parameters_are_not_known(job: Job) -> None:
    job.write({"rules.yaml": EDITS, "gan.gradsurgeon.yaml": EDITS})
    assert job.run().returncode == 0
    assert "### `rules.yaml`\n\nThe file differs.\n" in job.summary
    last = job.summary.splitlines()[-1]
    assert "give the action `params`, a file that `gradsurgeon params` writes" in last
    assert job.summary.count("`params`") == 1
    assert "\n\n\n" not in job.summary


def test_parameters_that_are_not_there_are_a_mistake_of_the_workflow(job: Job) -> None:
    job.write({"rules.yaml": EDITS})
    done = job.run(params="nowhere.json")
    assert done.returncode == 2
    assert (
        "::error title=gradsurgeon::`params: nowhere.json` is no file of this checkout"
        in done.stdout
    )
    assert (job.github.comments, job.summary) == ([], "")


def test_a_file_that_cannot_be_read_has_no_effect_to_show(job: Job) -> None:
    job.write({"rules.yaml": WRONG})
    assert job.run(params="params.json").returncode == 1
    assert "What the change does cannot be shown" in job.summary
    assert "error: unknown action `norm-lg`" in job.summary
    # Where the base is wrong, the repair is no fault.
    job.base = git(job.checkout, "rev-parse", "HEAD")
    job.write({"rules.yaml": CLEAN})
    assert job.run(params="params.json").returncode == 0
    assert "1 rule file was checked: nothing is wrong with it." in job.summary
    assert "What the change does cannot be shown" in job.summary


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
        for hook in hooks:
            assert f'r"{hook["files"]}"' in script


def test_the_script_runs_on_no_more_than_python(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "GITHUB_EVENT_NAME": "push"}
    script = [sys.executable, "-I", "-S", str(ACTION / "review.py"), "--only-refuse"]
    assert subprocess.run(script, env=env, cwd=tmp_path, check=False).returncode == 0
