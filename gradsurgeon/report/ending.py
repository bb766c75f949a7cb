"""What traps and checks found in a run, and how the run ended, as far as files and processes tell."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from gradsurgeon.common._grouping import grouped
from gradsurgeon.common.events import NO_OVERFLOW, NO_RULE_ACTS, OUR_FAULT, TRIPS, Event
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.rules_and_events import by_kind

State = Literal["running", "ended", "stopped", "unknown"]
ENDED = "ended"  # all that there is to say of a clean end


class EventTally(NamedTuple):
    """What the events of a run say together."""

    kinds: Counter[str]  # how many events there are of each kind, without the spikes that rules cut
    findings: tuple[str, ...]  # of traps and checks, a sentence each, those with a diagnosis first
    no_rule: str = ""  # that no rule acts, in a sentence
    cut_steps: frozenset[int] = frozenset()  # the steps in which rules cut spikes
    traps: int = 0  # how many traps tripped; each is one of the findings

    @property
    def trips(self) -> int:
        """How often traps tripped."""
        return self.kinds["trap"] + self.kinds["spike"]


def tally_of(events: Iterable[Event], edits: Collection[str] = ()) -> EventTally:
    """Return what events say together. `edits` are the ids of rules that edit, whose events are no trips."""
    counted = []
    cut_steps = set()
    traps = set()
    diagnoses: dict[str, str] = {}
    others: dict[str, str] = {}
    no_rule = ""
    for event in events:
        if event.kind in TRIPS and event.rule in edits:
            cut_steps.add(event.step)
            continue
        counted.append(event)
        if event.message.startswith(NO_RULE_ACTS) and OUR_FAULT in event.message:
            no_rule = f"no rule acts, from step {event.step} on"
        # A trap that trips in many steps is one finding. A check reports each of its findings once.
        key = event.message
        if event.kind != "check":
            key = event.rule
            if event.kind in TRIPS:
                traps.add(key)
        diagnosis = _diagnosis(event)
        if event.kind in TRIPS:
            others.setdefault(key, event.message.partition("\n")[0])
            if diagnosis:
                diagnoses.setdefault(key, diagnosis)
        elif diagnosis and (key in diagnoses or NO_OVERFLOW in event.message):
            # A later pass has shown the line, or a scaler skips what is no overflow.
            diagnoses[key] = diagnosis
    findings = {**diagnoses, **others, **diagnoses}
    kinds = by_kind(counted)
    return EventTally(kinds, tuple(findings.values()), no_rule, frozenset(cut_steps), len(traps))


def _diagnosis(event: Event) -> str:
    """Return the diagnosis of an event as one sentence with its line, empty if it blames nothing."""
    diagnosis = event.diagnosis
    if diagnosis is None or not diagnosis.get("where"):
        return ""
    text = f"step {event.step}: {diagnosis.get('headline', '')}"
    if diagnosis.get("file"):
        if diagnosis["where"] == "output gradient":
            # No operation is blamed, and the line is that of the loss.
            text += ", which ends at"
        else:
            text += ","
        text += f" {diagnosis['file']}:{diagnosis.get('line')}"
    return text


def clock(seconds: float) -> str:
    """Return a moment, given in seconds since 1970, as the reader's clock shows it."""
    time = datetime.fromtimestamp(seconds, UTC).astimezone()
    return f"{time:%Y-%m-%d %H:%M:%S}"


class Ending(NamedTuple):
    """How a run ended."""

    state: State  # "unknown" where no end was written
    words: str  # the same in words, with the ranks if they differ, and what was skipped or found
    ranks: Mapping[int, str]
    is_broken: bool  # a rank was stopped


def _outcome(state: State, tally: EventTally) -> str:
    """Return what was skipped, cut or lost, and what traps and checks found."""
    kinds = tally.kinds
    skipped = kinds["skipped-step"] + kinds["scaler-skip"]
    never_fired = kinds["never-fired"]
    trips = tally.trips
    # The trip that stopped the run is in the words.
    if skipped or never_fired or (trips == 1 and state == "stopped"):
        trips = 0
    facts = [
        (skipped, "step", "{} skipped"),
        (never_fired, "rule", "{} never fired"),
        (trips, "step", "traps tripped in {}"),
        (len(tally.cut_steps), "step", "spikes cut in {}"),
        (kinds["hook-lost"], "time", "hooks lost {}"),
        (kinds["hook-rearmed"], "time", "hooks installed again {}"),
        (kinds["check"], "fault", "checks found {}"),
    ]
    text = ""
    for number, noun, words in facts:
        if number:
            text += f", {words.format(count(number, noun))}"
    return text


# A run is what the first of these is that one of its ranks is.
_FIRST: Sequence[State] = ("running", "stopped", "unknown", "ended")


def ending_of(ends: Mapping[int, RankEnd], tally: EventTally) -> Ending:
    states = []
    words = {}
    for rank, end in ends.items():
        state, words[rank] = end_of_rank(end)
        states.append(state)
    shown = []
    for text, ranks in grouped(words, words.__getitem__).items():
        of_ranks = f"rank {', '.join(map(str, ranks))}: " if len(ranks) < len(words) else ""
        shown.append(of_ranks + text)
    state = min(states, key=_FIRST.index)
    is_broken = not {"stopped", "unknown"}.isdisjoint(states)
    return Ending(state, "; ".join(shown) + _outcome(state, tally), words, is_broken)


def end_of_rank(end: RankEnd) -> tuple[State, str]:
    """Return how one rank ended, and the same in words."""
    if end.state == "running":
        return "running", "running"
    if end.state == "stopped":
        at = ""
        if end.written is not None:
            at = f", last record at {clock(end.written)}"
        return "unknown", f"no end was written{at}: what came after it is missing"
    ending = end.ending
    error = ending.get("error")
    if not error:
        return "ended", ENDED
    text = f"stopped by {error}"
    step = ending.get("step")
    rule = ending.get("rule")
    if isinstance(step, int) and isinstance(rule, str) and rule:
        text = f"stopped at step {step} by rule {rule} ({error})"
    elif isinstance(ending.get("status"), int):
        text += f", exit status {ending['status']}"
    return "stopped", printable(text)
