"""The GitHub Action against harm: answers of the API that are none, redirects, links in a checkout."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import EDITS, git
from pull_requests import WRONG, Job, answering, pull_request

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with pull_request(tmp_path) as one:
        yield one


def http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (http(b"{}", "500 x"), "HTTP status 500"),
        (b"", "Remote end closed connection without response"),
        (b"SSH-2.0-x\r\n", "SSH-2.0-x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[", "IncompleteRead(1 bytes read"),
        (http(b"<html>"), "Expecting value"),
        (http(b'{"message": "x"}'), "the API answered with no list of comments: {'message': 'x'}"),
        (http(b"null"), "the API answered with no list of comments: None"),
        (http(b"[" * 200_000), "recursion"),
        (http(b"\xff\xfe["), "codec can't decode"),
    ],
)
def test_no_odd_answer_is_a_failure(job: Job, raw: bytes, why: str) -> None:
    job.write({"rules.yaml": EDITS})
    with answering(raw) as job.github:
        done = job.run()
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    (told,) = [line for line in done.stdout.splitlines() if "No comment was written" in line]
    assert re.match("::(notice|warning) title=gradsurgeon::", told)
    assert why in told
    assert "`rules.yaml`" in job.summary


def test_what_is_no_comment_is_passed_over(job: Job) -> None:
    job.write({"rules.yaml": EDITS})
    job.run()
    (mine,) = job.github.comments
    odd: list[Any] = ["a", None, {}, {"id": 1, "user": None, "body": mine["body"]}]
    odd.append({"id": "x", "user": {"type": "Bot"}, "body": mine["body"]})
    job.github.comments[:] = [*odd, {**mine, "id": 6}]
    done = job.run()
    assert (done.returncode, "No comment" in done.stdout) == (0, False)
    assert job.github.asked[-1] == "PATCH /repos/me/net/issues/comments/6"


def test_the_token_goes_to_the_named_api_only(job: Job) -> None:
    job.write({"rules.yaml": EDITS})
    with answering(http(b"[]")) as other:
        away = http(b"", "302 Found", f"Location: {other.url}/elsewhere\r\n")
        with answering(away) as job.github:
            done = job.run()
    assert other.asked == []
    assert job.github.given == ["Bearer secret"]
    told = "(HTTP status 302: the token is not sent to where that leads)"
    assert f"::notice title=gradsurgeon::No comment was written {told}" in done.stdout
    assert done.returncode == 0


class TestLinks:
    """A pull request may bring links; what they lead to may hold anything, and is quoted nowhere."""

    TOLD = "it leads out of the checkout, so it is not read: put the rules into the file itself"

    def run(self, job: Job, target: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        (job.folder / "secret").write_text("hunter2\n")
        (job.checkout / "rules.yaml").unlink()
        (job.checkout / "rules.yaml").symlink_to(target)
        git(job.checkout, "config", "http.extraheader", "hunter2")
        job.write({"gan.gradsurgeon.yaml": WRONG})
        done = job.run(**inputs)
        told = done.stdout + done.stderr + job.summary + str(job.github.comments)
        assert "hunter2" not in told
        return done

    @pytest.mark.parametrize("target", ["../secret", ".git/config", "../nowhere", "rules.yaml"])
    def test_out_of_the_checkout(self, job: Job, target: str) -> None:
        done = self.run(job, target)
        assert done.returncode == 2
        assert f"::error title=gradsurgeon::`rules.yaml`: {self.TOLD}" in done.stdout
        assert f"### `rules.yaml`\n\nThis file cannot be reviewed: {self.TOLD}." in job.summary
        assert job.summary.count("`rules.yaml`") == 1
        # The others are reviewed all the same.
        assert "unknown action `norm-lg`" in job.summary

    def test_through_a_folder(self, job: Job) -> None:
        (job.folder / "far").mkdir()
        (job.folder / "far/rules.yaml").write_text("hunter2\n")
        (job.checkout / "near").symlink_to("../far")
        job.write({"other.yaml": "[]"})
        done = job.run(files="near/rules.yaml", params="params.json")
        assert (done.returncode, "hunter2" in done.stdout + job.summary) == (2, False)
        assert f"`near/rules.yaml`: {self.TOLD}" in done.stdout

    def test_inside_the_checkout(self, job: Job) -> None:
        (job.checkout / "linked.gradsurgeon.yaml").symlink_to("rules.yaml")
        job.write({"other.yaml": "[]"})
        done = job.run()
        assert done.returncode == 0
        assert "2 rule files were checked: nothing is wrong with them." in job.summary

    @pytest.mark.parametrize("name", ["params", "sarif_file"])
    def test_what_the_workflow_names(self, job: Job, name: str) -> None:
        (job.folder / "secret").write_text("hunter2\n")
        (job.checkout / "named").symlink_to("../secret")
        done = job.run(**{name: "named"})
        assert done.returncode == 2
        option = name.replace("_", "-")
        assert f"`{option}: named` leads out of this checkout: name a file in it" in done.stdout
        assert (job.folder / "secret").read_text() == "hunter2\n"
