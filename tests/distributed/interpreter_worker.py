"""Trains as drawn on each rank under DDP, under rules and by hand, and writes down where the two differ."""

from __future__ import annotations

import torch.distributed as dist
from drawn_trainings import Training, by_hand, check, trainings, under_rules
from fuzzing import examples
from hypothesis import HealthCheck, Phase, given, settings
from ranks import Json
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

found: Json = {"trainings": 0, "bitten": 0, "differ": []}


def wrap(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


@settings(
    derandomize=True,  # all ranks draw the same
    database=None,
    deadline=None,
    max_examples=examples(150),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(drawn=trainings(ranks=2))
def compare(drawn: tuple[list[Json], Training]) -> None:
    rules, training = drawn
    rank = dist.get_rank()
    found["trainings"] += 1
    try:
        expected = by_hand(rules, training, wrap=wrap, rank=rank)
        check(under_rules(rules, training, wrap=wrap, rank=rank), expected)
        found["bitten"] += bool(expected.records)
    except AssertionError as error:  # what raises on one rank leaves the other one waiting
        found["differ"].append(f"{error}\n{rules}\n{training}")


def main() -> Json:
    compare()
    return found


if __name__ == "__main__":
    work(main)
