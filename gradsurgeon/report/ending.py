"""How a run ended: as it was written, or as far as files and processes tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gradsurgeon.errors import printable
from gradsurgeon.events import TRIPS, Event
from gradsurgeon.planning.table import count
from gradsurgeon.report.diagnoses import first_diagnosis
from gradsurgeon.report.rules_and_events import by_kind

if TYPE_CHECKING:
    from gradsurgeon.store.run import Run

State = Literal["running", "ended", "stopped", "unknown"]


class Ending(NamedTuple):
    """How a run ended.

    Attributes:
        state: "running", "ended", "stopped" by something, or "unknown" where no end was written.
        words: the same in words, with the ranks if they differ.
        ranks: the words of each rank.
    """

    state: State
    words: str
    ranks: Mapping[int, str]

    def lines(self, events: Sequence[Event]) -> Iterator[str]:
        """Yield one or two lines: how the run ended, and the first diagnosis."""
        yield f"{self.words}{self.outcome(events)}"
        if found := first_diagnosis(events):
            yield f"  {printable(found)}"

    def outcome(self, events: Sequence[Event]) -> str:
        """Return what was skipped, and that a run that came to its end is clean."""
        kinds = by_kind(events)
        skipped = kinds["skipped-step"] + kinds["scaler-skip"]
        trips = sum(kinds[kind] for kind in TRIPS)
        if never := kinds["never-fired"]:
            idle = f"{count(never, 'rule')} never fired"
            return f", {count(skipped, 'step')} skipped, {idle}" if skipped else f", {idle}"
        if skipped:
            return f", {count(skipped, 'step')} skipped"
        if trips > (self.state == "stopped"):
            return f", traps tripped in {count(trips, 'step')}"
        return ", clean" if self.state == "ended" else ""

    def level(self, events: Sequence[Event]) -> Literal["good", "warning", "bad", "running"]:
        """Return how serious it is, for a colour."""
        if self.state in ("stopped", "unknown"):
            return "bad"
        outcome = self.outcome(events)
        if self.state == "running":
            return "warning" if outcome else "running"
        return "good" if outcome == ", clean" else "warning"


# A run is what the first of these is that one of its ranks is.
_FIRST: Sequence[State] = ("running", "stopped", "unknown", "ended")


def ending_of(run: Run) -> Ending:
    """Return how a run ended, by what its ranks have written."""
    found = {
        rank: _of_rank(state, run.endings.get(rank, {}), run.last_write(rank))
        for rank, state in run.states.items()
    }
    state = min((one for one, _ in found.values()), key=_FIRST.index)
    words = {rank: text for rank, (_, text) in found.items()}
    by_words: dict[str, list[str]] = {}
    for rank, text in words.items():
        by_words.setdefault(text, []).append(str(rank))
    if len(by_words) == 1:
        (text,) = by_words
    else:
        text = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_words.items())
    return Ending(state, text, words)


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
    step, rule = ending.get("step"), ending.get("rule")
    if isinstance(step, int) and isinstance(rule, str) and rule:
        return "stopped", f"stopped at step {step} by rule {printable(rule)} ({error})"
    return "stopped", f"stopped by {error}"
