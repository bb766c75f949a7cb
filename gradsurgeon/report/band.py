"""The band on top of a run: one of three states, and a sentence that says why."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.ending import Ending, EventTally

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


class Outcome(NamedTuple):
    """What there is to say of a run: how it ended, and what stands out."""

    band: Band
    ending: Ending | None  # `None` for a session
    diagnosis: str  # the first finding of a trap or check
    faults: Sequence[str]  # the callouts that are faults and that no event tells
    facts: Sequence[str]  # what differs from what is usual and is no fault, a sentence each
    found: str  # how many faults checks found and how many traps tripped; "nothing" if there is nothing else to say

    @property
    def top(self) -> list[str]:
        """The band, and how the run ended if the band does not say it; nothing for a session without a fault."""
        ending = self.ending
        if ending is None and self.band.state == "fine":
            return []
        lines = [str(self.band)]
        if ending is None:
            return lines
        if not self.band.sentence.startswith(ending.words):
            lines.append(ending.words)
        elif self.diagnosis:
            lines.append(f"  {printable(self.diagnosis)}")
        return lines

    @property
    def callout_lines(self) -> list[str]:
        """The faults of the records, then at most four lines of facts under their title."""
        lines = list(self.faults)
        if not self.facts:
            return lines
        lines.append("facts:")
        shown = self.facts
        if len(shown) > _FACTS:
            shown = shown[: _FACTS - 1]
        lines += [f"  {fact}" for fact in shown]
        more = len(self.facts) - len(shown)
        if more:
            lines.append(f"  and {more:,} more")
        return lines


def outcome_of(
    ending: Ending | None, tally: EventTally, callouts: Sequence[Callout], *, is_pack: bool = False
) -> Outcome:
    """Return what there is to say of a run. Nobody chose the rules of a pack for this model, so one may have nothing to do."""
    fault_kinds = set(_FAULTS)
    if tally.kinds["trap"]:
        fault_kinds -= {NONFINITE, PASSED}
    if tally.kinds["scaler-skip"]:
        fault_kinds.discard(PASSED)
    faults = []
    facts = []
    for callout in callouts:
        if callout.kind in fault_kinds:
            faults.append(callout.text)
        else:
            facts.append(callout.text)
    findings = [*tally.findings, *faults]
    found = "nothing"
    band = _band(ending, tally, findings, callouts, is_pack=is_pack)
    untrapped = len(findings) - tally.traps
    if untrapped:
        found = count(untrapped, "fault")
    elif callouts or band.state != "fine" or tally.kinds["hook-rearmed"]:
        found = "no fault"
    if tally.traps:
        found += f"; {count(tally.traps, 'trap')} tripped"
    diagnosis = next(iter(tally.findings), "")
    return Outcome(band, ending, diagnosis, faults, facts, found)


def _band(
    ending: Ending | None,
    tally: EventTally,
    findings: Sequence[str],
    callouts: Sequence[Callout],
    *,
    is_pack: bool,
) -> Band:
    words = "no fault found"
    if ending is not None:
        words = ending.words
        if ending.is_broken:
            return Band("broken", words)
    if findings:
        sentence = findings[0]
        if len(findings) > 1:
            sentence += f" (and {count(len(findings) - 1, 'other fault')})"
        stayed_nonfinite = any(callout.kind == NONFINITE for callout in callouts)
        if stayed_nonfinite and tally.kinds["trap"]:
            return Band("broken", sentence)
        return Band("look", sentence)
    if tally.no_rule:
        return Band("look", tally.no_rule)
    # A `GradScaler` skips steps of healthy trainings, so its events are no reason.
    is_idle = tally.kinds["never-fired"] and not is_pack
    kinds = tally.kinds
    if kinds["skipped-step"] or kinds["hook-lost"] or tally.cut_steps or is_idle:
        return Band("look", words)
    if ending is not None and ending.is_clean and not callouts:
        words += ", clean"
    return Band("fine", words)
