"""How a run ended, as far as files and processes tell, and the diagnosis in the message of a trap."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from gradsurgeon.common.events import Event, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.rules_and_events import by_kind

# The first two lines of a diagnosis in the message of a trap.
_HEADLINE = re.compile(r"^diagnosis \([^)]*\): (.*)$", re.MULTILINE)
_PLACE = re.compile(r"^  at (.*?)(?:, in \S+)?(?:: .*)?$", re.MULTILINE)

State = Literal["running", "ended", "stopped", "unknown"]


class Ending(NamedTuple):
    """How a run ended."""

    state: State  # "unknown" where no end was written
    words: str  # the same in words, with the ranks if they differ, and what was skipped or found
    ranks: Mapping[int, str]
    diagnosis: str
    trips: int  # by step, those of checks included
    is_clean: bool

    @property
    def lines(self) -> list[str]:
        """One or two lines: how the run ended, and the first diagnosis."""
        lines = [self.words]
        if self.diagnosis:
            lines.append(f"  {printable(self.diagnosis)}")
        return lines

    @property
    def level(self) -> Literal["good", "warning", "bad", "running"]:
        """How serious it is, for a colour."""
        if self.state in ("stopped", "unknown"):
            return "bad"
        if not self.is_clean:
            return "warning"
        if self.state == "running":
            return "running"
        return "good"


def _outcome(state: State, events: Sequence[Event], tripped: Counter[str]) -> str:
    """Return what was skipped, and what traps and checks found."""
    kinds = by_kind(events)
    skipped = kinds["skipped-step"] + kinds["scaler-skip"]
    never = kinds["never-fired"]
    faults = tripped["check"]
    trips = tripped.total() - faults
    text = ""
    if skipped:
        text += f", {count(skipped, 'step')} skipped"
    if never:
        text += f", {count(never, 'rule')} never fired"
    # The trip that stopped the run is in the words.
    reported = int(state == "stopped")
    if not text and trips > reported:
        text = f", traps tripped in {count(trips, 'step')}"
    if faults:
        text += f", checks found {count(faults, 'fault')}"
    return text


# A run is what the first of these is that one of its ranks is.
_FIRST: Sequence[State] = ("running", "stopped", "unknown", "ended")


def ending_of(
    ends: Mapping[int, RankEnd], events: Sequence[Event], edits: Collection[str]
) -> Ending:
    """Return how a run ended. `edits` are the ids of rules that edit, whose events are no trips."""
    states = []
    words = {}
    ranks_by_words: dict[str, list[str]] = {}
    for rank, end in ends.items():
        state, text = end_of_rank(end)
        states.append(state)
        words[rank] = text
        ranks_by_words.setdefault(text, []).append(str(rank))
    shown = []
    for text, ranks in ranks_by_words.items():
        if len(ranks_by_words) == 1:
            shown.append(text)
        else:
            shown.append(f"rank {', '.join(ranks)}: {text}")
    state = min(states, key=_FIRST.index)
    tripped = by_kind(event for event in events if is_trip(event, edits))
    outcome = _outcome(state, events, tripped)
    text = "; ".join(shown) + outcome
    if state == "ended" and not outcome:
        text += ", clean"
    diagnosis = first_diagnosis(events, edits)
    return Ending(state, text, words, diagnosis, tripped.total(), not outcome)


def end_of_rank(end: RankEnd) -> tuple[State, str]:
    """Return how one rank ended, and the same in words."""
    if end.state == "running":
        return "running", "running"
    if end.state == "stopped":
        at = ""
        if end.written is not None:
            # Local time, as on the reader's clock.
            time = datetime.fromtimestamp(end.written, UTC).astimezone()
            at = f", last record at {time:%Y-%m-%d %H:%M:%S}"
        return "unknown", f"no end was written{at}: what came after it is missing"
    error = printable(str(end.ending.get("error", "")))
    if not error:
        return "ended", "ended"
    step = end.ending.get("step")
    rule = end.ending.get("rule")
    status = end.ending.get("status")
    if isinstance(step, int) and isinstance(rule, str) and rule:
        return "stopped", f"stopped at step {step} by rule {printable(rule)} ({error})"
    text = f"stopped by {error}"
    if isinstance(status, int):
        text += f", exit status {status}"
    return "stopped", text


def first_diagnosis(events: Sequence[Event], edits: Collection[str] = ()) -> str:
    """Return the first diagnosis as one sentence with its line, else what the first trap found; empty if none tripped."""
    for event in events:
        headline = _HEADLINE.search(event.message)
        if headline is None:
            continue
        text = f"step {event.step}: {headline[1]}"
        place = _PLACE.search(event.message, headline.end())
        if place is not None:
            text += f", {place[1]}"
        return text
    for event in events:
        if is_trip(event, edits):
            return event.message.partition("\n")[0]
    return ""
