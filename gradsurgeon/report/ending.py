"""What traps and checks found in a run, and how the run ended, as far as files and processes tell."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from gradsurgeon.common.events import NO_RULE_ACTS, OUR_FAULT, TRIPS, Event
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.rules_and_events import by_kind

State = Literal["running", "ended", "stopped", "unknown"]


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
        key = event.message if event.kind == "check" else event.rule
        diagnosis = _diagnosis(event)
        if event.kind in TRIPS:
            others.setdefault(key, event.message.partition("\n")[0])
            if event.kind != "check":
                traps.add(key)
            if diagnosis:
                diagnoses.setdefault(key, diagnosis)
        elif event.diagnosis and key in diagnoses:
            # A later pass has shown the line.
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
        text += f", {diagnosis['file']}:{diagnosis.get('line')}"
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
    is_clean: bool  # ended, and nothing was skipped or found
    is_broken: bool  # a rank was stopped


def _outcome(state: State, tally: EventTally) -> str:
    """Return what was skipped, cut or lost, and what traps and checks found."""
    kinds = tally.kinds
    skipped = kinds["skipped-step"] + kinds["scaler-skip"]
    text = ""
    if skipped:
        text += f", {count(skipped, 'step')} skipped"
    if kinds["never-fired"]:
        text += f", {count(kinds['never-fired'], 'rule')} never fired"
    # The trip that stopped the run is in the words.
    reported = int(state == "stopped")
    if not text and tally.trips > reported:
        text = f", traps tripped in {count(tally.trips, 'step')}"
    if tally.cut_steps:
        text += f", spikes cut in {count(len(tally.cut_steps), 'step')}"
    if kinds["hook-lost"]:
        text += f", hooks lost {count(kinds['hook-lost'], 'time')}"
    if kinds["hook-rearmed"]:
        text += f", hooks installed again {count(kinds['hook-rearmed'], 'time')}"
    if kinds["check"]:
        text += f", checks found {count(kinds['check'], 'fault')}"
    return text


# A run is what the first of these is that one of its ranks is.
_FIRST: Sequence[State] = ("running", "stopped", "unknown", "ended")


def ending_of(ends: Mapping[int, RankEnd], tally: EventTally) -> Ending:
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
    outcome = _outcome(state, tally)
    is_clean = state == "ended" and not outcome
    is_broken = not {"stopped", "unknown"}.isdisjoint(states)
    return Ending(state, "; ".join(shown) + outcome, words, is_clean, is_broken)


def end_of_rank(end: RankEnd) -> tuple[State, str]:
    """Return how one rank ended, and the same in words."""
    if end.state == "running":
        return "running", "running"
    if end.state == "stopped":
        at = ""
        if end.written is not None:
            at = f", last record at {clock(end.written)}"
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
