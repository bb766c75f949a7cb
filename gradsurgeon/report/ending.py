"""How a run ended, as far as files and processes tell, and the first diagnosis."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from gradsurgeon.common.events import Event, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.rules_and_events import by_kind

State = Literal["running", "ended", "stopped", "unknown"]


class Ending(NamedTuple):
    """How a run ended."""

    state: State  # "unknown" where no end was written
    words: str  # the same in words, with the ranks if they differ, and what was skipped or found
    ranks: Mapping[int, str]
    diagnosis: str
    trips: int  # of traps, by step
    findings: int  # of checks
    is_clean: bool  # ended, and nothing was skipped or found
    is_broken: bool  # a rank was stopped


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
    diagnosis = first_diagnosis(events, edits)
    faults = tripped["check"]
    trips = tripped.total() - faults
    is_clean = state == "ended" and not outcome
    is_broken = not {"stopped", "unknown"}.isdisjoint(states)
    return Ending(state, text, words, diagnosis, trips, faults, is_clean, is_broken)


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
        diagnosis = event.diagnosis
        if diagnosis is None or not diagnosis.get("where"):
            continue
        text = f"step {event.step}: {diagnosis.get('headline', '')}"
        if diagnosis.get("file"):
            text += f", {diagnosis['file']}:{diagnosis.get('line')}"
        return text
    for event in events:
        if is_trip(event, edits):
            return event.message.partition("\n")[0]
    return ""
