"""The header and the summary of a launched script: on stderr, by one rank, never inside a progress bar."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradsurgeon.errors import printable
from gradsurgeon.events import Event
from gradsurgeon.launcher.exiting import to_stderr
from gradsurgeon.planning import NO_MATCH
from gradsurgeon.planning.table import NOUNS, count, grid
from gradsurgeon.schema import RuleSet

if TYPE_CHECKING:
    from gradsurgeon.launcher.attached import Attached

_MOST_EVENTS = 5
# So a session begins to say that it counts backward passes.
_NO_OPTIMIZER = "no torch optimizer owns the parameters"


def write(lines: Iterable[str], rank: int) -> None:
    """Write lines to stderr, on the first rank only."""
    if rank == 0 and (lines := list(lines)):
        with beside_progress_bars():
            to_stderr("\n".join(lines))


@contextmanager
def beside_progress_bars() -> Iterator[None]:
    """Take progress bars off the terminal for the moment, and draw them again after it."""
    module: Any = sys.modules.get("tqdm.std")
    if module is None or not getattr(module.tqdm, "_instances", ()):
        yield
        return
    with module.tqdm.get_lock():
        # `external_write_mode` would also redraw those on a stdout that goes elsewhere.
        bars = [bar for bar in module.tqdm._instances if _is_in_the_way(bar)]  # noqa: SLF001 # all there are
        for bar in bars:
            bar.clear(nolock=True)
        try:
            yield
        finally:
            for bar in bars:
                bar.refresh(nolock=True)


def _is_in_the_way(bar: Any) -> bool:
    """Tell whether a progress bar is where lines on stderr go."""
    if not hasattr(bar, "start_t"):
        return False  # not drawn yet
    if bar.fp == sys.stderr:
        return True
    try:
        return os.path.sameopenfile(bar.fp.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return False  # no file, such as a cell of a notebook


def header(made: Attached, rules: RuleSet, optimizers: Sequence[str]) -> None:
    """Say which model was found and what each rule has bound to in it."""
    manifest = made.plan.manifest
    by = f", updated by {' and '.join(optimizers)}" if optimizers else ""
    by += f", from step {made.start}" if made.start else ""
    first = (
        f"gradsurgeon: {printable(rules.file)} on {made.title} "
        f"({count(len(manifest.params), 'parameter')}, {count(manifest.elements, 'element')}{by})"
    )
    rows = []
    for rule in rules.rules:
        bound = made.plan.of(rule.id)
        what = count(len(bound), NOUNS[rule.target]) if bound else "nothing in this model"
        when = "before each update" if rule.role == "trap" else f"at {rule.point}"
        rows.append((printable(rule.id), rule.action, when, what))
    lines = [first, *grid(rows)]
    own = [
        f"{rule}: {text}"
        for rule, texts in made.plan.rule_warnings.items()
        for text in texts
        if text != NO_MATCH  # its row says so
    ]
    lines += [f"  note: {printable(text)}" for text in (*made.plan.warnings, *own)]
    if made.observing:
        lines.append("  observing only: nothing is edited")
    if made.record:
        lines.append(f"  records: {printable(made.record)}")
    write(lines, made.rank)


def summary(made: Attached) -> None:
    """Say what the rules did, and what happened."""
    session = made.session
    statuses = session.status()
    if not made.begun and not any(status.fired for status in statuses.values()):
        text = "no gradient came until the end, so no rule acted on it"
        write([f"gradsurgeon: {made.title}: {text}"], made.rank)
        return
    since = f", from step {made.start}" if made.start else ""
    lines = [f"gradsurgeon: {made.title}, {count(session.step - made.start, 'step')}{since}"]
    # Whoever counts on a schedule has to know that its steps are no updates of an optimizer.
    lines += [
        f"  note: {printable(event.message)}"
        for event in session.events
        if event.kind == "notice" and event.message.startswith(_NO_OPTIMIZER)
    ]
    rows = []
    for rule in made.plan.rules.rules:
        if not made.plan.of(rule.id):
            continue
        status = statuses[rule.id]
        changed = f"changed {status.changed:.0%}" if rule.role == "edit" else ""
        last = "" if status.last_step is None else f"last at step {status.last_step}"
        rows.append((printable(rule.id), rule.action, f"fired {status.fired:,}", changed, last))
    lines += grid(rows)
    lines += _events(session.events)
    if made.record:
        lines.append(f"  gradsurgeon report {printable(made.record)}")
    write(lines, made.rank)


def untrained(made: Attached) -> str:
    """Say of a model that was not updated what was seen of it."""
    seen = "gradients came" if made.begun else "an optimizer was built, and no gradient came"
    return f"{made.title}: {seen}"


def _events(events: Sequence[Event]) -> list[str]:
    """Return the events that matter: the last ones in full, the others counted."""
    telling = [event for event in events if event.kind != "notice"]
    lines = []
    if len(telling) > _MOST_EVENTS:
        counts = Counter(event.kind for event in telling[:-_MOST_EVENTS])
        before = ", ".join(f"{many} {kind}" for kind, many in counts.items())
        lines.append(f"  earlier: {before}")
    for event in telling[-_MOST_EVENTS:]:
        text = printable(event.message.partition("\n")[0])
        rule = f", rule {printable(event.rule)}" if event.rule else ""
        # Some messages begin with their place, because they are raised as well.
        place = "" if text.startswith("step ") else f"step {event.step}{rule}: "
        lines.append(f"  {event.kind}: {place}{text}")
    return lines
