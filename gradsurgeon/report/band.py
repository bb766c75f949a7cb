"""The band on top of a run: one of three states, and a sentence that says why."""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from gradsurgeon.common.events import Event, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.ending import Ending, first_diagnosis
from gradsurgeon.report.rules_and_events import by_kind

State = Literal["fine", "look", "broken"]
# Events of these kinds ask for a look. A `GradScaler` skips steps of healthy trainings.
_KINDS = ("skipped-step", "never-fired")
# Callouts of these kinds are faults, and counted as findings. Others are facts: healthy trainings have them also.
NONFINITE = "non-finite"
PASSED = "non-finite for a while"
EXPLODING = "exploding"
REPLICAS = "replicas"
_FACTS = 4
_FAULTS = frozenset({NONFINITE, PASSED, EXPLODING, REPLICAS})


class Callout(NamedTuple):
    """One thing that stands out in the records of a run: a word for its kind, and a sentence."""

    kind: str
    text: str


class Band(NamedTuple):
    """The state of a run, and one sentence."""

    state: State
    sentence: str

    def __str__(self) -> str:
        return f"{self.state}: {printable(self.sentence)}"


def band_of(
    ending: Ending | None,
    events: Sequence[Event],
    edits: Collection[str],
    callouts: Sequence[Callout],
) -> Band:
    """Return the band of a run. `edits` are the ids of rules that edit; `ending` is `None` for a session."""
    if ending is not None and ending.state in ("stopped", "unknown"):
        return Band("broken", ending.words)
    findings = findings_of(events, edits, callouts)
    if findings:
        sentence = findings[0]
        if len(findings) > 1:
            sentence += f" (and {count(len(findings) - 1, 'other fault')})"
        return Band("look", sentence)
    words = "no fault found"
    if ending is not None:
        words = ending.words
    kinds = by_kind(events)
    if any(kinds[kind] for kind in _KINDS):
        return Band("look", words)
    if ending is not None and ending.is_clean and not callouts:
        words += ", clean"
    return Band("fine", words)


def findings_of(
    events: Sequence[Event], edits: Collection[str], callouts: Sequence[Callout]
) -> list[str]:
    """Return what traps and checks found and which faults the records show, a sentence each, a diagnosis first."""
    findings: dict[str, str] = {}
    for event in events:
        if not is_trip(event, edits):
            continue
        # A trap that trips in many steps is one finding. A check reports each of its findings once.
        key = event.rule
        if event.kind == "check":
            key = event.message
        findings.setdefault(key, event.message.partition("\n")[0])
    texts = list(findings.values())
    diagnosis = first_diagnosis(events, edits)
    if diagnosis and diagnosis not in texts:
        texts[0] = diagnosis
    texts += [callout.text for callout in faults_of(events, callouts)]
    return texts


def faults_of(events: Sequence[Event], callouts: Sequence[Callout]) -> list[Callout]:
    """Return the callouts that are faults, and that no event has told."""
    told = set()
    kinds = by_kind(events)
    if kinds["trap"]:
        told.update({NONFINITE, PASSED})
    if kinds["scaler-skip"]:
        told.add(PASSED)
    return [callout for callout in callouts if callout.kind in _FAULTS - told]


def facts_of(events: Sequence[Event], callouts: Sequence[Callout]) -> list[str]:
    """Return the callouts that are no faults, as sentences."""
    faults = faults_of(events, callouts)
    return [callout.text for callout in callouts if callout not in faults]


def found(findings: Sequence[str], facts: Sequence[str]) -> str:
    """Return how many things were found, in words. Beside facts that is never "nothing"."""
    if findings:
        return count(len(findings), "fault")
    if facts:
        return "no fault"
    return "nothing"


def fact_lines(facts: Sequence[str]) -> Iterator[str]:
    """Yield the facts under their title, at most four lines of them."""
    if not facts:
        return
    yield "facts:"
    shown = facts
    if len(facts) > _FACTS:
        shown = facts[: _FACTS - 1]
    for fact in shown:
        yield f"  {fact}"
    if len(facts) > len(shown):
        yield f"  and {len(facts) - len(shown):,} more"
