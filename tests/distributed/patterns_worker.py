"""Runs patterns without rules, with a trap that does not trip, and with one that does, one after the other."""

from __future__ import annotations

import gc
import platform
import sys
import time
import warnings

import torch.distributed as dist
from distributed import patterns
from distributed.patterns import Case, Pattern
from ranks import Json
from small import fields_of
from worker import work

from gradsurgeon.distributed import votes
from gradsurgeon.tensors import _channel

HOW = ("plain", "quiet", "trips")
# Models that are divided over ranks.
DIVIDED = ("fsdp2", "hsdp", "tensor")
# Before the patterns: two ranks each have a host of their own.
HOSTS = "--hosts"


def train(pattern: Pattern, how: str) -> Json:
    """Train, and tell what came of it."""
    dist.barrier()
    case, error, start = Case(how), "", time.monotonic()
    try:
        pattern(case)
    except Exception as caught:  # noqa: BLE001 # whatever it is, the other rank is to end as well
        error = f"{type(caught).__name__}: {caught}"
    took = time.monotonic() - start
    events, recorded = [], {}
    if case.session is not None:
        case.session.remove()
        if how == "records" and dist.get_rank() == 0:
            recorded = {
                at: case.session.history("last.weight", rule=at) for at in ("accumulated", "step")
            }
        # Nothing that votes stays, though the session is still there.
        assert not list(_channel._open)
        assert not [one for one in gc.get_objects() if type(one) is votes.Voter]
        events = fields_of(case.session, "kind", "step", "message")
    return {
        "error": error,
        "took": took,
        "updates": case.updates,
        "passes": case.passes,
        "weights": case.weights(),
        "events": events,
        "norms": case.norms,
        "recorded": recorded,
    }


def main() -> Json:
    """Run the patterns that are named after the file."""
    warnings.simplefilter("ignore")
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    known = {**patterns.ALIKE, **patterns.FSDP2}
    known |= {"hsdp": patterns.hsdp, "hsdp_own_skip": patterns.hsdp_own_skip}
    names = sys.argv[2:]
    if names[0] == HOSTS:
        names = names[1:]
        votes.MANY = 3
        own = f"host {dist.get_rank() // 2}"
        platform.node = lambda: own
    found = {name: {how: train(known[name], how) for how in HOW} for name in names}
    for name in names:
        if name.startswith(DIVIDED):
            found[name]["records"] = train(known[name], "records")
    return found


if __name__ == "__main__":
    work(main)
