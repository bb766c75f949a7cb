"""A user's own actions and statistics on two ranks; each rank writes down what it saw."""

from __future__ import annotations

import own_actions  # noqa: F401 # for its actions
import torch
from distributed.batches import data, make, mine, whole, wrapped
from distributed.sharded_worker import rules, steps
from ranks import Json
from small import events_of, fired, rules_of_workers
from worker import work

import gradsurgeon

RULES = rules(*rules_of_workers("own actions"))


def told(session: gradsurgeon.Session, model: torch.nn.Module) -> Json:
    names = [param.name for param in session.plan.manifest.params]
    asked = [("sizes", stat) for stat in ("large", "top", "power")]
    asked += [("named", stat) for stat in ("large", "power")]
    return {
        "records": {
            f"{rule} {name} {stat}": [value for _, value in session.history(name, stat, rule=rule)]
            for rule, stat in asked
            for name in names
        },
        "copies": [whole(copy) for copy in session.captured("kept").values()],
        "weights": [whole(param) for param in model.parameters()],
        "fired": fired(session),
    }


def find() -> Json:
    found = {}
    for kind in ("one process", "DDP", "FSDP2"):
        model = make()
        trained = wrapped(kind, model)
        with gradsurgeon.apply(model, RULES) as session:
            steps(trained, data if kind == "one process" else mine)
            found[kind] = told(session, model)
        found[kind]["trapped"] = trapped(kind)
    return found


def trapped(kind: str) -> Json:
    """Train under a trap whose limit the gradients of the second step exceed, in which it is due."""
    model = make()
    trained = wrapped(kind, model)
    batch = data if kind == "one process" else mine
    rule: Json = {
        "id": "trap",
        "action": "size-trap",
        "params": "*",
        "limit": 0,
        "then": "skip-step",
    }
    rule["steps"] = {"from": 1, "to": 2}
    with gradsurgeon.apply(model, rules(rule)) as session:
        steps(trained, batch)
        events = events_of(session, "trap")
    return {
        "events": [(event.step, event.message.partition("\n")[0]) for event in events],
        "weights": [whole(param) for param in model.parameters()],
    }


if __name__ == "__main__":
    work(find)
