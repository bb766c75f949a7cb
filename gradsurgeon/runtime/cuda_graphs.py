"""CUDA graphs: Python runs while a graph is captured, and never when it is replayed."""

from __future__ import annotations

from collections.abc import Iterator

from gradsurgeon import _torch
from gradsurgeon.actions import EditRule, FreezeRule
from gradsurgeon.compiler import Program
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.context import Context


def rules_lost_in_replay(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the rules that a replay would silence, each with the reason."""
    for rule in program.rules:
        schedule = rule.steps
        if not isinstance(rule, EditRule | FreezeRule):
            yield rule.id, f"`{rule.action}` has to look at each step from Python"
        elif (schedule.from_, schedule.to, schedule.every) != (0, None, 1):
            yield rule.id, "its `steps` are decided in Python"


def refuse_graph_capture(context: Context) -> None:
    """Refuse to be captured with rules that the replays of the graph would silence."""
    if not _torch.is_capturing():
        return
    for rule, reason in rules_lost_in_replay(context.program):
        raise GradSurgeonError(
            f"rule {rule}: a CUDA graph is being captured, whose replays run no Python, and {reason}: "
            "capture without the rule (session.pause() or remove()), or train without the graph"
        )
    text = (
        "a CUDA graph is being captured: its replays repeat the edits of the rules, but count no step, no "
        "firing and no change, and tell of no norm that is not finite"
    )
    context.event_log.once("cuda-graph", text, step=context.counters.latest)
