"""The GitHub Action against harm: answers of the API that are none, redirects, links in a checkout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import EDITS
from pull_requests import Job, answering, pull_request

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
