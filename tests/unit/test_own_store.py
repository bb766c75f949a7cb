"""Our connection to the key-value store of a job, and sessions that look for others there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from gradsurgeon.distributed.session_discovery import Meeting, SessionInfo
from gradsurgeon.tensors import _job_store

dist: Any = torch.distributed
INFO = SessionInfo("plan", 0, drifts=False, measures=False, host="here", peers=(0, 1))
OTHER = INFO._replace(plan="another plan")


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("job")
def test_keys_are_apart_by_prefix() -> None:
    one, other = _job_store.OwnStore("one"), _job_store.OwnStore("other")
    one.set("key", "value")
    assert one.get("key") == b"value"
    assert not other.check(["key"])
    assert [one.add("count", 2), one.add("count", 1), other.add("count", 1)] == [2, 3, 1]


@pytest.mark.usefixtures("job")
def test_one_failed_request_is_the_last_one() -> None:
    one, other = _job_store.OwnStore("one"), _job_store.OwnStore("other")
    _job_store.connect().store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(RuntimeError):
        one.get("never set")
    for store in (one, other, one.at("third"), _job_store.OwnStore("fourth")):
        assert not store.is_served()
        with pytest.raises(RuntimeError, match="has failed before"):
            store.set("key", "value")
    # The connection of the script is another one.
    _job_store.store().set("key", "value")


@pytest.mark.usefixtures("job")
def test_the_connection_outlives_the_process_groups() -> None:
    store = _job_store.OwnStore("one")
    dist.destroy_process_group()
    store.at("other").set("key", "value")
    assert store.at("other").check(["key"])


def test_no_connection_is_tried_to_a_host_that_has_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=1)
    client = dist.TCPStore("127.0.0.1", host.port, None, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    try:
        del host
        assert not _job_store.OwnStore("one").is_served()
    finally:
        dist.destroy_process_group()
    # A connection that is tried in vain is told there, many lines long.
    assert capfd.readouterr().err == ""


def test_questions_make_no_connections_and_notice_the_end_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, is_master=False)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    try:
        store = _job_store.OwnStore("one")
        made: list[object] = []
        monkeypatch.setattr(socket, "create_connection", lambda *args: made.append(args))
        assert all(store.is_served() for _ in range(50))
        store.set("key", "value")
        assert made == []
        del host
        assert not store.is_served()
    finally:
        dist.destroy_process_group()


def meeting() -> Meeting:
    return Meeting((), [(4, 4)], INFO)


@pytest.mark.usefixtures("job")
def test_sessions_find_each_other_without_waiting() -> None:
    met = meeting()
    assert met.roll(0.0) is None
    met.store.set("1", json.dumps(OTHER))
    roll = met.roll(0.0)
    assert roll is not None
    assert [roll.sessions[rank].plan for rank in (0, 1)] == ["plan", "another plan"]


@pytest.mark.usefixtures("job")
def test_peers_of_peers_belong_to_them() -> None:
    met = meeting()
    met.store.set("1", json.dumps(OTHER._replace(peers=(1, 2))))
    assert met.roll(0.0) is None
    met.store.set("2", json.dumps(OTHER._replace(peers=(1, 2))))
    roll = met.roll(0.0)
    assert roll is not None
    assert roll.wanted == (0, 1, 2)


@pytest.mark.usefixtures("job")
def test_a_session_that_leaves_is_not_taken_for_a_later_one() -> None:
    met = meeting()
    left = met.store
    assert met.leave() == [1]
    left.set("1", json.dumps(INFO))
    # Rank 1 finds the roll closed, and comes to the next one, as a later session here does.
    later = meeting()
    assert later.roll(0.0) is None
    assert left.get("closed") == b"[]"
    later.store.set("1", json.dumps(INFO))
    assert later.roll(0.0) is not None


@pytest.mark.usefixtures("job")
def test_without_a_store_a_session_finds_itself_alone() -> None:
    met = meeting()
    _job_store.connect().store = None
    roll = met.roll(0.0)
    assert roll is not None
    assert roll.sessions == {0: INFO}
    assert met.leave() == [1]
