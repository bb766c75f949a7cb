"""The channel between ranks over the key-value store of a job, sessions that look for others there, and what is left there."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from gradsurgeon.actions.checks.base import Finding, Replicas
from gradsurgeon.actions.checks.ranks_check import _Series
from gradsurgeon.distributed import votes
from gradsurgeon.distributed.ranks import SKIP
from gradsurgeon.distributed.session_discovery import Meeting, SessionInfo
from gradsurgeon.distributed.votes import Objection, Voter
from gradsurgeon.records.shared_rows import PendingRow, SharedRows
from gradsurgeon.records.store import Key
from gradsurgeon.tensors import _channel, _job_store
from gradsurgeon.tensors._channel import Channel

dist: Any = torch.distributed
INFO = SessionInfo("plan", 0, drifts=False, measures=False, host="here", peers=(0, 1))
OTHER = INFO._replace(plan="another plan")
ABSENT = "nothing heard of rules on rank 1"


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def connection(rank: int) -> _job_store.Connection:
    """Return a connection of another rank."""
    made = _job_store.Connection(_job_store.store())
    made.rank = rank
    return made


def channels(topic: str, ranks: int = 2) -> list[Channel]:
    """Return the channel of each rank."""
    return [Channel(topic, range(ranks), connection(rank)) for rank in range(ranks)]


def key_count() -> int:
    """Return the number of keys in the store of the job."""
    return int(_job_store.store().num_keys())


@pytest.mark.usefixtures("job")
def test_one_failed_request_is_the_last_one() -> None:
    one, other = Channel("one"), Channel("other")
    _job_store.connect().store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(RuntimeError):
        one.get("never set")
    for channel in (one, other, one.at("third"), Channel("fourth")):
        with pytest.raises(RuntimeError, match="an earlier request has failed"):
            channel.set("key", "value")
    # The connection of the script is another one.
    _job_store.store().set("key", "value")


@pytest.mark.usefixtures("job")
def test_the_connection_outlives_the_process_groups() -> None:
    channel = Channel("one")
    dist.destroy_process_group()
    channel.at("other").set("key", "value")
    assert channel.at("other").check("key")


@pytest.mark.usefixtures("job")
def test_messages_come_in_order_and_are_gone_when_they_are_read() -> None:
    Channel("other").set("key", "value")
    before = key_count()
    first, second, third = channels("messages", 3)
    second.post(0, "one")
    second.post(0, "two")
    assert first.take([1, 2]) is None
    third.post(0, "three")
    assert first.take([1, 2]) == ["one", "three"]
    assert first.take([1]) == ["two"]
    assert first.take([1]) is None
    assert not first.check("key")
    assert key_count() == before


@pytest.mark.usefixtures("job")
def test_a_rank_that_reads_nothing_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channel, "_MOST_UNREAD", 2)
    first, second = channels("messages")
    before = key_count()
    for number in range(5):
        second.post(0, number)
    assert key_count() == before + 2
    assert [first.take([1]), first.take([1]), first.take([1])] == [[0], [1], None]
    second.post(0, 5)
    assert first.take([1]) == [5]


def together(channels: list[Channel], limit: float) -> list[dict[int, Any]]:
    """Let some ranks meet at the same time."""
    with ThreadPoolExecutor(len(channels)) as threads:
        coming = [threads.submit(c.meet, "here", c.rank, (0, 1), limit) for c in channels]
        return [one.result() for one in coming]


@pytest.mark.usefixtures("job")
def test_ranks_that_meet_get_the_messages_of_all() -> None:
    assert together(channels("meeting"), 10.0) == [{0: 0, 1: 1}] * 2


@pytest.mark.usefixtures("job")
def test_a_rank_that_comes_late_learns_who_was_there() -> None:
    first, second = channels("meeting")
    assert together([first], 0.0) == together([second], 10.0) == [{0: 0}]


@pytest.mark.usefixtures("job")
def test_keys_go_when_their_rank_has_gone_on_often() -> None:
    channel = Channel("one", (0, 1))
    before = key_count()
    channel.set("first", 1)
    channel.go_on()
    channel.set("early", 1)
    for _ in range(_channel.KEPT - 1):
        channel.go_on()
    channel.set("late", 1)
    assert key_count() == before + 3
    channel.go_on()
    assert not channel.check("early")
    assert channel.check("first", "late")


@pytest.mark.usefixtures("job")
def test_the_last_rank_that_leaves_deletes_all_keys() -> None:
    before = key_count()
    first, second = channels("one")
    first.set("of all", 1)
    first.agree("agreed", 1)
    second.agree("agreed", 2)
    kept = Channel("other", (0,))
    kept.agree("kept", 1)
    kept.keep("kept")
    kept.close()
    for number in range(3):
        second.post(0, number)
    first.take([1])
    first.close()
    first.close()
    assert second.check("left/0", "of all", "agreed", "0/1/2", "0/1/3")
    assert not first.is_swept()
    second.close()
    # What is kept stays.
    assert key_count() == before + 1
    assert first.is_swept()
    with pytest.raises(RuntimeError, match="has left"):
        second.check("left/0")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "b", "b"]])
def test_votes_leave_nothing_behind(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "MANY", 3)
    before = key_count()
    said: list[str] = []
    of_ranks = channels("votes", len(hosts))
    # A rank that serves its host comes first.
    ranks = sorted(range(len(hosts)), key=lambda rank: rank % 2)
    voters = [Voter(of_ranks[rank], hosts, 5.0, said.append) for rank in ranks]
    for number in range(1, 4):
        for rank, voter in zip(ranks, voters, strict=True):
            assert voter.cast([Objection(rank, "trap", SKIP, "w", "w", "text")]) == number
        for voter in voters:
            decision = voter.decision(number)
            assert decision is not None
            assert len(decision.objections) == len(hosts)
    assert voters[0].exchange("text", 0.01) == {0: "text"}
    for voter in voters:
        voter.channel.close()
    assert said == []
    assert key_count() == before


@pytest.mark.usefixtures("job")
def test_a_late_vote_leaves_nothing_behind() -> None:
    before = key_count()
    said: list[str] = []
    first, second = (Voter(c, ["here"] * 2, 0.0, said.append) for c in channels("votes"))
    first.cast(())
    assert first.decision(1) == ((), False)
    assert len(said) == 1
    second.cast([Objection(1, "trap", SKIP, "w", "w", "text")])
    # It obeys what was decided without it.
    assert second.decision(1) == ((), False)
    first.channel.close()
    second.channel.close()
    assert key_count() == before


@pytest.mark.usefixtures("job")
def test_rows_and_questions_leave_nothing_behind() -> None:
    before = key_count()
    told: list[str] = []
    ranks = [SharedRows(lambda _topic, _rule, text: told.append(text)) for _ in range(2)]
    for rows, channel in zip(ranks, channels("rows"), strict=True):
        rows.open(channel)
        for number in range(3):
            key = Key("norms", "l1", "accumulated", ("weight",))
            row = PendingRow(key, number, [0], shares={(0, 1): [0]}, number=number)
            rows.add(row, torch.tensor([[1.0]]))
    leader, other = ranks
    assert list(other.exchange()) == []
    assert [float(values) for _, values in leader.exchange()] == [2.0] * 3
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(rows.ask, "weight", "l1", lambda: "answer") for rows in ranks]
        assert [one.result() for one in asked] == ["answer"] * 2
    assert key_count() > before
    for rows in (other, leader):
        assert list(rows.close()) == []
    assert told == []
    assert key_count() == before


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("order", "updates"), [((0, 1), 3), ((1, 0), 40)])
def test_replicas_leave_nothing_behind(
    order: tuple[int, int], updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_count()
    found: list[str] = []
    series = []
    for rank in (0, 1):
        monkeypatch.setattr(_job_store, "connect", partial(connection, rank))
        series.append(_Series(Replicas("key", [0], (0, 1), (0, 0)), "replicas/1"))
    for number in range(1, updates + 1):
        replicas = Replicas("key", [0], (0, 1), (number, 0), promised=True)
        for rank in (1, 0):
            norm = 2.0 if number == updates and rank == 1 else 1.0
            data = [float(rank), 0.0, 0.0, 0.0]
            values = torch.tensor([[norm, float(number), 1.0, 1.0], data])
            found += [finding.text for finding in series[rank].add(replicas, number, values)]
    for rank in order:
        found += [finding.text for finding in series[rank].close()]
    # The last row is compared, though its batch is not complete.
    assert len(found) == 1
    assert key_count() == before


@pytest.mark.usefixtures("job")
def test_the_rows_of_a_rank_that_ends_later_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    series = []
    for rank in (0, 1):
        monkeypatch.setattr(_job_store, "connect", partial(connection, rank))
        series.append(_Series(Replicas("key", [0], (0, 1), (0, 0)), "replicas/1"))
    replicas = Replicas("key", [0], (0, 1), (1, 0), promised=True)

    def update(rank: int) -> list[Finding]:
        values = [[1.0 + rank, 1.0, 1.0, 1.0], [float(rank), 0.0, 0.0, 0.0]]
        return [*series[rank].add(replicas, 0, torch.tensor(values))]

    take = Channel.take

    def behind(channel: Channel, senders: Sequence[int]) -> list[Any] | None:
        """Let rank 1 go on only when rank 0 has found nothing of it."""
        messages = take(channel, senders)
        if messages is None and ended and not channel.is_over:
            ended.clear()
            update(1)
            assert [*series[1].close()] == []
        return messages

    monkeypatch.setattr(Channel, "take", behind)
    ended: list[bool] = []
    assert update(0) == []
    ended.append(True)
    (finding,) = series[0].close()
    assert "ranks 0, 1 differ in the gradients" in finding.text


def test_questions_make_no_connections_and_notice_the_end_of_the_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, is_master=False)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    try:
        channel = Channel("one")
        made: list[object] = []
        monkeypatch.setattr(socket, "create_connection", lambda *args: made.append(args))
        for number in range(50):
            channel.set("key", number)
        assert made == []
        del host
        with pytest.raises(RuntimeError, match="the process that hosts it has ended"):
            channel.check("key")
    finally:
        dist.destroy_process_group()
    # A connection that is tried in vain is told there, many lines long.
    assert capfd.readouterr().err == ""


def meeting(rank: int = 0, monkeypatch: pytest.MonkeyPatch | None = None) -> Meeting:
    if monkeypatch is not None:
        monkeypatch.setattr(_job_store, "connect", partial(connection, rank))
    return Meeting((), [(4, 4)], INFO)


@pytest.mark.usefixtures("job")
def test_sessions_find_each_other_without_waiting() -> None:
    met = meeting()
    assert not met.roll(0.0)
    met.channel.set("met/1", OTHER)
    assert met.roll(0.0)
    assert [met.sessions[rank].plan for rank in (0, 1)] == ["plan", "another plan"]
    assert met.lacking == "rank 1 has other rules, mode or step than rank 0"
    assert met.find(0.0) == met.lacking


@pytest.mark.usefixtures("job")
def test_peers_of_peers_belong_to_them() -> None:
    met = meeting()
    met.channel.set("met/1", INFO._replace(peers=(1, 2)))
    assert not met.roll(0.0)
    met.channel.set("met/2", INFO._replace(peers=(1, 2)))
    assert met.roll(0.0)
    assert met.channel.ranks == (0, 1, 2)
    assert met.lacking == ""
    assert met.find(0.0) is met.channel


@pytest.mark.usefixtures("job")
def test_a_session_that_leaves_is_not_taken_for_a_later_one() -> None:
    met = meeting()
    left = Channel(met.channel.topic)
    assert met.find(None) == ABSENT
    left.set("met/1", INFO)
    # Rank 1 finds the roll closed, and comes to the next one, as a later session here does.
    later = meeting()
    assert not later.roll(0.0)
    assert left.agree("met/closed", [1]) == []
    later.channel.set("met/1", INFO)
    assert later.roll(0.0)


@pytest.mark.usefixtures("job")
def test_a_roll_without_some_ranks_stays_closed_and_nothing_else_stays() -> None:
    before = key_count()
    met = meeting()
    assert met.roll(0.1)
    assert met.lacking == f"{ABSENT} within 10 s"
    met.channel.close()
    assert key_count() == before + 1
    # As rank 1 comes to it, at last.
    assert Channel(met.channel.topic).agree("met/closed", [1]) == [0]


@pytest.mark.usefixtures("job")
def test_a_session_that_goes_on_to_the_next_roll_takes_its_key_along() -> None:
    before = key_count()
    met = meeting()
    Channel(met.channel.topic).agree("met/closed", [1])
    assert met.find(0.0) is None
    assert met.find(None) == ABSENT
    # The closed rolls stay.
    assert key_count() == before + 2


@pytest.mark.usefixtures("job")
def test_without_a_store_a_session_finds_itself_alone() -> None:
    met = meeting()
    _job_store.connect().store = None
    assert met.roll(0.0)
    assert met.sessions == {0: INFO}
    assert met.find(None) == ABSENT
