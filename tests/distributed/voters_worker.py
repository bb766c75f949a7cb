"""Four ranks vote: by hosts of two and rank by rank, one of them late, and at last without a store."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import Json

from gradsurgeon.distributed import votes
from gradsurgeon.distributed.ranks import SKIP
from gradsurgeon.distributed.votes import Objection, Voter, VoteResult
from gradsurgeon.tensors import _job_store
from gradsurgeon.tensors._channel import Channel

PASSES = 100
OBJECTED = {10: (3,), 20: (0, 1, 2, 3), 30: (1, 2)}


def objection(rank: int, number: int) -> Objection:
    """Return what a rank has against a pass."""
    return Objection(rank, "trap", SKIP, "w", "w", f"pass {number}", guilty=rank == 1)


def told(decision: VoteResult | None) -> Any:
    """Return a decision as JSON can hold it."""
    if decision is None:
        return None
    return [sorted((one.rank, one.text) for one in decision.objections), decision.unanimous]


def voted(kind: str, own_hosts: list[str]) -> Json:
    """Cast many votes; read them in every other pass, and now and then one of an earlier pass."""
    rank = dist.get_rank()
    said: list[str] = []
    voter = Voter(Channel(kind, range(4)), own_hosts, 30.0, said.append)
    decisions, keys = {}, []
    for number in range(1, PASSES + 1):
        dist.barrier()
        objections = [objection(rank, number)] if rank in OBJECTED.get(number, ()) else []
        assert voter.cast(objections) == number
        if number % 2 == 0 or rank == 2:
            decisions[number] = told(voter.decision(number))
        if number in (40, PASSES):
            dist.barrier()
            keys.append(_job_store.store().num_keys())
            dist.barrier()
    earlier = told(voter.decision(PASSES - 5))
    found = {"serves": voter._counter.serves, "decisions": decisions, "keys": keys, "said": said}
    dist.barrier()
    voter.channel.close()
    return {**found, "earlier": earlier, "over": told(voter.decision(PASSES))}


def served_by_one_that_leaves() -> Json:
    """Let the ranks that serve their hosts leave before the others have read the last decision."""
    rank = dist.get_rank()
    said: list[str] = []
    voter = Voter(Channel("leaving", range(4)), ["a", "a", "b", "b"], 30.0, said.append)
    number = voter.cast([objection(rank, 1)] if rank == 3 else [])
    dist.barrier()
    if voter._counter.serves:
        voter.channel.close()
        del voter
        dist.barrier()
        return {"decision": None, "said": said}
    dist.barrier()
    found = {"decision": told(voter.decision(number)), "said": said}
    voter.channel.close()
    return found


def late() -> Json:
    """Rank 3 votes when the others have given up, against the update."""
    rank = dist.get_rank()
    said: list[str] = []
    voter = Voter(Channel("late", range(4)), ["here"] * 4, 0.5, said.append)
    decisions = []
    for number in range(1, 4):
        dist.barrier()
        if rank == 3 and number == 2:
            time.sleep(1.5)
        voter.cast([objection(rank, number)] if rank == 3 and number > 1 else [])
        decisions.append(told(voter.decision(number)))
    dist.barrier()
    voter.channel.close()
    return {"decisions": decisions, "said": said}


def met() -> Json:
    """Let ranks meet, of which one comes too late."""
    rank = dist.get_rank()
    voter = Voter(Channel("met", range(4)), ["here"] * 4, 30.0, print)
    voter.cast(())
    all_of_them = voter.exchange({"of": rank}, 10.0)
    if rank == 3:
        time.sleep(1.0)
    some = voter.exchange(rank, 0.3)
    dist.barrier()
    voter.channel.close()
    return {"all": sorted(all_of_them.items()), "some": sorted(some.items())}


def left(out: Path, *, killed: bool) -> Json:
    """Let rank 0, which hosts the store, leave before the others have read what all said."""
    said: list[str] = []
    voter = Voter(Channel("left", range(4)), ["here"] * 4, 30.0, said.append)
    number = voter.cast([objection(3, 1)] if dist.get_rank() == 3 else [])
    dist.barrier()
    if dist.get_rank() == 0:
        if killed:
            out.write_text("{}", encoding="utf-8")
            os._exit(0)
        # The session is gone, and its process comes to its end.
        voter.channel.close()
        return {}
    while not Path(f"{sys.argv[1]}.0").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    first = told(voter.decision(number))
    # The store may fail at this pass or the next: what was asked for first may still be under way.
    later = [told(voter.decision(voter.cast(()))) for _ in range(2)] if killed else []
    voter.channel.close()
    return {"first": first, "later": later, "said": said}


def main() -> None:
    """Run every part, and write down what came of it; rank 0 leaves first."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    out = Path(f"{sys.argv[1]}.{dist.get_rank()}")
    found: Json = {}
    killed = "killed" in sys.argv
    if not killed:
        found = {"by ranks": voted("ranks", ["a", "a", "b", "b"])}
        votes.MANY = 3
        found["by hosts"] = voted("hosts", ["a", "a", "b", "b"])
        found["leaving"] = served_by_one_that_leaves()
        found["late"] = late()
        found["met"] = met()
    found["left"] = left(out, killed=killed)
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
