"""The band on top of a run: one of three states, and a sentence that says why."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.ending import ENDED, Ending, EventTally

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
    top: list[
        str
    ]  # the band, and how the run ended if the band does not say it; nothing for a session without a fault
    diagnosis: str  # the first finding of a trap or check
    remarks: tuple[str, ...]  # all callouts, the faults that no event tells first
    callout_lines: list[
        str
    ]  # the faults that no event tells, then at most four lines of facts under their title
    found: str  # how many faults checks found and how many traps tripped; "nothing" if there is nothing else to say


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
    band = _band(ending, tally, findings, callouts, is_pack=is_pack)
    diagnosis = next(iter(tally.findings), "")
    found = "nothing"
    untrapped = len(findings) - tally.traps
    if untrapped:
        found = count(untrapped, "fault")
    elif callouts or band.state != "fine" or tally.kinds["hook-rearmed"]:
        found = "no fault"
    if tally.traps:
        found += f"; {count(tally.traps, 'trap')} tripped"
    top = list(_top(band, ending, diagnosis))
    remarks = (*faults, *facts)
    if len(facts) > _FACTS:
        facts[_FACTS - 1 :] = [f"and {len(facts) - _FACTS + 1:,} more"]
    lines = faults
    if facts:
        lines.append("facts:")
        lines += [f"  {fact}" for fact in facts]
    return Outcome(band, top, diagnosis, remarks, lines, found)


def _top(band: Band, ending: Ending | None, diagnosis: str) -> Iterator[str]:
    if ending is not None or band.state != "fine":
        yield str(band)
    if ending is None:
        return
    if not band.sentence.startswith(ending.words):
        yield ending.words
    elif diagnosis:
        yield f"  {printable(diagnosis)}"


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
    kinds = tally.kinds
    if findings:
        sentence = findings[0]
        if len(findings) > 1:
            sentence += f" (and {count(len(findings) - 1, 'other fault')})"
        stayed_nonfinite = any(callout.kind == NONFINITE for callout in callouts)
        if stayed_nonfinite and kinds["trap"]:
            return Band("broken", sentence)
        return Band("look", sentence)
    if tally.no_rule:
        return Band("look", tally.no_rule)
    # A `GradScaler` skips steps of healthy trainings, so its events are no reason.
    is_idle = kinds["never-fired"] and not is_pack
    if kinds["skipped-step"] or kinds["hook-lost"] or tally.cut_steps or is_idle:
        return Band("look", words)
    if words == ENDED and not callouts:
        words += ", clean"
    return Band("fine", words)
