"""How a run ended, as far as files and processes tell, and the diagnosis in the message of a trap."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gradsurgeon.common.events import Event, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.rules_and_events import by_kind

if TYPE_CHECKING:
    from gradsurgeon.records.store.run import Run

_HEAD = re.compile(r"diagnosis \(([^)]*)\): (.*)")
_AT = re.compile(r"  at (.*?)(?:, in (\S+))?(?:: (.*))?")
_TENSOR = re.compile(r"  (in|out) +(\S+) (\[[^\]]*\] \S+): (.*)")
_CAUSE = re.compile(r"  cause: (.*)")
_REMEDY = re.compile(r"  to try: (.*)")
_MAGNITUDE = re.compile(r"    (.*?)  +(\S+)")

State = Literal["running", "ended", "stopped", "unknown"]


class Ending(NamedTuple):
    """How a run ended."""

    state: State  # "unknown" where no end was written
    words: str  # the same in words, with the ranks if they differ
    ranks: Mapping[int, str]
    edits: Collection[str] = frozenset()  # ids of rules that edit, whose events are no trips

    def lines(self, events: Sequence[Event]) -> Iterator[str]:
        """Yield one or two lines: how the run ended, and the first diagnosis."""
        yield f"{self.words}{self.outcome(events)}"
        if found := first_diagnosis(events, self.edits):
            yield f"  {printable(found)}"

    def outcome(self, events: Sequence[Event]) -> str:
        """Return what was skipped, and that a run that came to its end is clean."""
        kinds = by_kind(events)
        tripped = by_kind([one for one in events if is_trip(one, self.edits)])
        faults = tripped.pop("check", 0)
        trips = tripped.total()
        skipped = kinds["skipped-step"] + kinds["scaler-skip"]
        never = kinds["never-fired"]
        found = [f", {count(skipped, 'step')} skipped"] if skipped else []
        found += [f", {count(never, 'rule')} never fired"] if never else []
        if not found and trips > (self.state == "stopped"):
            found.append(f", traps tripped in {count(trips, 'step')}")
        found += [f", checks found {count(faults, 'fault')}"] if faults else []
        return "".join(found) or (", clean" if self.state == "ended" else "")

    def level(self, events: Sequence[Event]) -> Literal["good", "warning", "bad", "running"]:
        """Return how serious it is, for a colour."""
        if self.state in ("stopped", "unknown"):
            return "bad"
        if self.outcome(events) not in ("", ", clean"):
            return "warning"
        return "running" if self.state == "running" else "good"


# A run is what the first of these is that one of its ranks is.
_FIRST: Sequence[State] = ("running", "stopped", "unknown", "ended")


def ending_of(run: Run, edits: Collection[str] = frozenset()) -> Ending:
    states, words = [], {}
    for rank, state in run.states.items():
        of_rank, words[rank] = _of_rank(state, run.endings.get(rank, {}), run.last_write(rank))
        states.append(of_rank)
    by_words: dict[str, list[str]] = {}
    for rank, text in words.items():
        by_words.setdefault(text, []).append(str(rank))
    every = [f"rank {', '.join(ranks)}: {text}" for text, ranks in by_words.items()]
    text = "; ".join(every if len(every) > 1 else by_words)
    return Ending(min(states, key=_FIRST.index), text, words, edits)


def _of_rank(state: str, ending: Mapping[str, Any], written: float | None) -> tuple[State, str]:
    if state == "running":
        return "running", "running"
    if state == "stopped":
        # Local time, as on the reader's clock.
        time = None if written is None else datetime.fromtimestamp(written, UTC).astimezone()
        at = "" if time is None else f", last record at {time:%Y-%m-%d %H:%M:%S}"
        return "unknown", f"no end was written{at}: what came after it is missing"
    error = printable(str(ending.get("error", "")))
    if not error:
        return "ended", "ended"
    step, rule, status = (ending.get(key) for key in ("step", "rule", "status"))
    if isinstance(step, int) and isinstance(rule, str) and rule:
        return "stopped", f"stopped at step {step} by rule {printable(rule)} ({error})"
    exit_status = f", exit status {status}" if isinstance(status, int) else ""
    return "stopped", f"stopped by {error}{exit_status}"


def diagnosis_of(message: str) -> dict[str, Any] | None:
    """Return headline, place, tensors, cause, remedy and magnitudes of a diagnosis, None if the message has none."""
    lines = message.split("\n")
    heads = ((number, _HEAD.fullmatch(line)) for number, line in enumerate(lines))
    start, head = next((pair for pair in heads if pair[1]), (0, None))
    if head is None:
        return None
    found: dict[str, Any] = {"certainty": head[1], "headline": head[2]}
    found |= {"tensors": [], "magnitudes": [], "rest": []}
    for line in lines[start + 1 :]:
        if match := _MAGNITUDE.fullmatch(line):
            # A view has the numbers of what it shows.
            found["magnitudes"] += [[match[1], match[2]]] if "view" not in match[1] else []
        elif "at" not in found and (match := _AT.fullmatch(line)):
            found |= {"at": match[1], "function": match[2] or "", "source": match[3] or ""}
        elif match := _TENSOR.fullmatch(line):
            found["tensors"].append(list(match.groups()))
        elif "cause" not in found and (match := _CAUSE.fullmatch(line)):
            found["cause"] = match[1]
        elif match := _REMEDY.fullmatch(line):
            found["remedy"] = match[1]
        elif not line.startswith("  largest magnitudes"):
            found["rest"].append(line.strip())
    return found


def first_diagnosis(events: Sequence[Event], edits: Collection[str] = ()) -> str:
    """Return the first diagnosis as one sentence with its line, else what the first trap found; empty if none tripped."""
    for event in events:
        if (found := diagnosis_of(event.message)) is not None:
            at = f", {found['at']}" if found.get("at") else ""
            return f"step {event.step}: {found['headline']}{at}"
    trips = (event.message.partition("\n")[0] for event in events if is_trip(event, edits))
    return next(trips, "")
