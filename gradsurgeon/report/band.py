"""The band on top of a run: one of three states, and a sentence that says why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from gradsurgeon.common.events import NO_RULE_ACTS, Event, is_trip
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.ending import Ending, first_diagnosis

State = Literal["fine", "look", "broken"]
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


@dataclass(frozen=True)
class Outcome:
    """What there is to say of a run: what stands out, and how it ended.

    Attributes:
        ending: how the run ended, `None` for a session.
        events: what happened.
        edits: the ids of rules that edit, whose events are no trips.
        callouts: what stands out in the records.
        is_pack: whether a pack has all rules: nobody chose them for this model, so one may have nothing to do.
    """

    ending: Ending | None
    events: Sequence[Event]
    edits: Collection[str]
    callouts: Sequence[Callout]
    is_pack: bool = False

    @cached_property
    def band(self) -> Band:
        ending = self.ending
        if ending is not None and ending.is_broken:
            return Band("broken", ending.words)
        findings = self.findings
        if findings:
            sentence = findings[0]
            if len(findings) > 1:
                sentence += f" (and {count(len(findings) - 1, 'other fault')})"
            callouts = {callout.kind for callout in self.callouts}
            # Norms may stay non-finite to the end.
            if "trap" in self._kinds and NONFINITE in callouts:
                return Band("broken", sentence)
            return Band("look", sentence)
        for event in self.events:
            if event.message.startswith(NO_RULE_ACTS):
                return Band("look", f"step {event.step}: {event.message}")
        words = "no fault found"
        if ending is not None:
            words = ending.words
        # A `GradScaler` skips steps of healthy trainings, so its events are no reason.
        is_idle = "never-fired" in self._kinds and not self.is_pack
        if "skipped-step" in self._kinds or is_idle:
            return Band("look", words)
        if ending is not None and ending.is_clean and not self.callouts:
            words += ", clean"
        return Band("fine", words)

    @cached_property
    def _kinds(self) -> set[str]:
        """The kinds of the events."""
        return {event.kind for event in self.events}

    @property
    def top(self) -> list[str]:
        """The band, and how the run ended if the band does not say it; nothing for a session without a fault."""
        band = self.band
        ending = self.ending
        if ending is None and band.state == "fine":
            return []
        lines = [str(band)]
        if ending is None:
            return lines
        if not band.sentence.startswith(ending.words):
            lines.append(ending.words)
        elif ending.diagnosis:
            lines.append(f"  {printable(ending.diagnosis)}")
        return lines

    @cached_property
    def findings(self) -> list[str]:
        """What traps and checks found, and the faults that the records show, a sentence each, a diagnosis first."""
        findings: dict[str, str] = {}
        for event in self.events:
            if not is_trip(event, self.edits):
                continue
            # A trap that trips in many steps is one finding. A check reports each of its findings once.
            key = event.rule
            if event.kind == "check":
                key = event.message
            findings.setdefault(key, event.message.partition("\n")[0])
        texts = list(findings.values())
        diagnosis = first_diagnosis(self.events, self.edits)
        if diagnosis and diagnosis not in texts:
            texts[0] = diagnosis
        return texts + self.faults

    @cached_property
    def faults(self) -> list[str]:
        """The callouts that are faults, and that no event tells."""
        faults = set(_FAULTS)
        if "trap" in self._kinds:
            faults -= {NONFINITE, PASSED}
        if "scaler-skip" in self._kinds:
            faults.discard(PASSED)
        return [callout.text for callout in self.callouts if callout.kind in faults]

    @property
    def facts(self) -> list[str]:
        """What differs from what is usual and is no fault, a sentence each."""
        return [callout.text for callout in self.callouts if callout.text not in self.faults]

    @property
    def found(self) -> str:
        """How many faults were found, in words. "nothing" is of a run of which there is nothing else to say."""
        number = len(self.findings)
        if number:
            return count(number, "fault")
        if self.callouts or self.band.state != "fine":
            return "no fault"
        return "nothing"

    @property
    def callout_lines(self) -> list[str]:
        """The faults of the records, then at most four lines of facts under their title."""
        facts = self.facts
        if not facts:
            return self.faults
        more = len(facts) - _FACTS + 1
        if more > 1:
            facts = [*facts[:-more], f"and {more:,} more"]
        return [*self.faults, "facts:", *(f"  {fact}" for fact in facts)]
