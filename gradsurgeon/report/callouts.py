"""What stands out in the norms of a run, a sentence each, with the numbers that say so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.history import History, Track, Whole
from gradsurgeon.report.rules_and_events import GRADIENT, listed
from gradsurgeon.report.spikes import TIMES, Spike, change_of_level, largest_spike

_DEATHS = 3
# Norms of the layers of one model lie within fewer orders of magnitude; of few layers none is unusual.
_FAR, _LEAST_COMPARED = 1e4, 4
# The usual norm of a kind: many layers may have vanished, and a few may be large.
_USUAL_SHARE = 0.9
# An explosion grows so many times, to norms that no usual training has; or it has such norms from the start.
_GROWTH, _LARGE = 1e3, 1e2
# A module whose weight has so much more gradient than its bias: the gradient of the bias is zero by mathematics.
_SIBLING = 1e3
# Successive norms of a noisy tensor differ by a factor of 4, and by a power of 4 of that of others.
_NOISY, _NOISIER = math.log(4.0), 4.0
_LEAST_STEPS = 20
_MOST_FOR_LEVELS = 200_000


def callouts(history: History, params: int) -> Iterator[str]:
    """Yield what stands out.

    Args:
        history: of the run.
        params: the number of parameters of the model.
    """
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        found = _judged(tracks)
        wholes = history.gradients if kind == GRADIENT else []
        yield from _nonfinite(tracks, kind)
        yield from _exploding(tracks, found.exploded, kind)
        yield from _spike(tracks, found, wholes, kind, params)
        yield from _dead(tracks, kind)
        if GRADIENT in kind:
            yield from _vanishing(found, kind)
        yield from _noisy(tracks, found.noisy, kind)
        for whole in wholes:
            yield from _levels(whole, params)


def remarkable(history: History) -> set[str]:
    """Return the names of tensors that stand out, which a table shows first."""
    found = (_judged(history.of_kind(kind)) for kind in history.kinds)
    return {track.name for one in found for track in (*one.exploded, *one.vanished, *one.noisy)}


class _Judged(NamedTuple):
    """The tensors of one kind that stand out, and the usual norm beside those that exploded."""

    exploded: list[Track]
    vanished: list[Track]
    noisy: list[Track]
    usual: float


def _judged(tracks: Sequence[Track]) -> _Judged:
    exploded = _exploded(tracks)
    names = {track.name for track in exploded}
    # Beside an explosion all else is small.
    others = [track for track in tracks if track.name not in names]
    usual = _usual(others)
    return _Judged(exploded, _vanished(tracks, others, usual), _noisy_ones(tracks), usual)


def whole_name(whole: Whole, params: int) -> str:
    """Return what to call the norm of several tensors together."""
    number = len(whole.names)
    if number == 1:
        return f"norm of {printable(whole.names[0])}"
    return f"norm of {'all ' * (number == params)}{count(number, 'parameter')}"


def _word(word: str, kind: str) -> str:
    return word if kind == GRADIENT else f"{word} ({kind})"


def nouns(kind: str) -> str:
    return "parameter" if kind == GRADIENT else "tensor"


def _nonfinite(tracks: Sequence[Track], kind: str) -> Iterator[str]:
    bad = [track for track in tracks if track.nonfinite]
    if not bad:
        return
    spans = {track.name: track.nonfinite_steps for track in bad}
    first = min(begin for begin, _ in spans.values())
    last = max(end for _, end in spans.values())
    names = listed([track.name for track in bad if spans[track.name][0] == first])
    again = all(math.isfinite(track.last) for track in bad)
    until = f"until step {last}, finite again since" if again else ""
    text = f"{_word('non-finite', kind)}: {count(len(bad), nouns(kind))}, first at step {first}: {names}"
    yield f"{text}; {until}" if until else text


def _exploded(tracks: Sequence[Track]) -> list[Track]:
    usual = _usual(tracks)
    return [
        track
        for track in tracks
        if (track.rise >= _GROWTH and track.largest >= _LARGE)
        or (len(tracks) >= _LEAST_COMPARED and track.median >= _FAR * max(usual, 1.0))
    ]


def _end(track: Track) -> float:
    finite = track.tops[~np.isnan(track.tops)]
    return float(finite[-1]) if len(finite) else math.nan


def _exploding(tracks: Sequence[Track], far: Sequence[Track], kind: str) -> Iterator[str]:
    if not far:
        return
    grown = [track for track in far if track.rise >= _GROWTH]
    names = listed([track.name for track in far])
    if not grown:
        most = max(far, key=lambda track: track.median)
        text = (
            f"the median norm of {printable(most.name)} is {most.median:.3g}, and nine of ten {nouns(kind)}s have "
            f"less than {_usual(tracks):.3g}"
        )
        yield f"{_word('exploding', kind)}: {names}; {text}"
        return
    most = max(grown, key=lambda track: track.rise)
    begin, end = most.tops[most.tops > 0][0], _end(most)
    if most.growth * _GROWTH < most.rise:
        top = int(most.steps[np.nanargmax(most.tops)])
        text = (
            f"{printable(most.name)} grew from {begin:.3g} to {most.largest:.3g} at step {top}, and came down to "
            f"{end:.3g}"
        )
    else:
        text = f"{printable(most.name)} has grown from {begin:.3g} to {end:.3g}"
    if most.nonfinite and most.nonfinite_steps[1] >= int(most.steps[~np.isnan(most.tops)][-1]):
        text += f" before it was non-finite at step {most.nonfinite_steps[0]}"
    yield f"{_word('exploding', kind)}: {names}; {text}"


def spike_words(spike: Spike) -> str:
    return f"{spike.value:.3g} at step {spike.step}, {spike.times:.3g}x the steps before it"


def _spike(
    tracks: Sequence[Track], found: _Judged, wholes: Sequence[Whole], kind: str, params: int
) -> Iterator[str]:
    # A noisy tensor has peaks all the time, and an explosion ends in one.
    loud = {track.name for track in (*found.noisy, *found.exploded)}
    tracks = [track for track in tracks if track.name not in loud]
    for whole in wholes:
        finite = np.isfinite(whole.values)
        if (
            loud.isdisjoint(whole.names)
            and len(whole.names) > 1
            and (spike := largest_spike(whole.steps[finite], whole.values[finite]))
        ):
            # Those that stand out from themselves, by their share of the whole.
            norms = {one.name: _norm_at(one, spike.step) for one in tracks}
            far = [one for one in tracks if norms[one.name] > TIMES * one.median]
            if far:
                by_share = sorted(far, key=lambda one: norms[one.name], reverse=True)
                names = listed([one.name for one in by_share])
                whole_words = f"the {whole_name(whole, params)}, {spike_words(spike)}"
                yield f"largest spike: {whole_words}; most in {names}"
                return
    worst = max(tracks, key=_times, default=None)
    if worst is not None and worst.spike is not None:
        yield f"{_word('largest spike', kind)}: {printable(worst.name)}, {spike_words(worst.spike)}"


def _norm_at(track: Track, step: int) -> float:
    """Return the norm of a step, or the largest of its chunk; 0 where there is none."""
    place = int(np.searchsorted(track.steps, step, side="right")) - 1
    return float(np.nan_to_num(track.tops[place])) if place >= 0 else 0.0


def _times(track: Track) -> float:
    return track.spike.times if track.spike is not None else 0.0


def _dead(tracks: Sequence[Track], kind: str) -> Iterator[str]:
    """Name what is 0, as a layer of ReLUs is that no longer answers to anything."""
    alive = {_module(track.name) for track in tracks if track.largest > 0}
    zero = [
        track.name
        for track in tracks
        if track.is_zero and not (_is_bias(track) and _module(track.name) in alive)
    ]
    if zero:
        yield f"{_word('norm always exactly 0', kind)}: {listed(zero)}"
    since: dict[int, list[str]] = {}
    for track in tracks:
        # A training that converges to nothing shrinks before.
        if track.zero_since is not None and not track.growth * _FAR < 1:
            since.setdefault(track.zero_since, []).append(track.name)
    first = sorted(since)[:_DEATHS]
    for step in first:
        yield f"{_word('norm exactly 0', kind)} since step {step}, and until the end: {listed(since[step])}"
    if later := sum(len(names) for step, names in since.items() if step not in first):
        yield f"{_word('norm exactly 0', kind)} until the end, since later steps: {later:,} more"


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_bias(track: Track) -> bool:
    return "bias" in track.name.rpartition(".")[2]


def _usual(tracks: Sequence[Track]) -> float:
    medians = [track.median for track in tracks if 0 < track.median < math.inf]
    return float(np.quantile(medians, _USUAL_SHARE)) if medians else math.nan


def _vanished(tracks: Sequence[Track], others: Sequence[Track], usual: float) -> list[Track]:
    if len(tracks) < _LEAST_COMPARED:
        return []
    largest: dict[str, float] = {}
    for track in tracks:
        module = _module(track.name)
        largest[module] = max(largest.get(module, 0.0), track.median)
    # A training that converges shrinks all norms alike.
    growths = [track.growth for track in others if track.growth > 0]
    middle = float(np.median(growths)) if growths else math.nan
    return [
        track
        for track in tracks
        if track.median > 0
        and not (_is_bias(track) and track.median * _SIBLING < largest[_module(track.name)])
        and (track.median * _FAR < usual or track.growth * _FAR < min(1.0, middle))
    ]


def _vanishing(found: _Judged, kind: str) -> Iterator[str]:
    far, usual = sorted(found.vanished, key=lambda track: track.median), found.usual
    if not far:
        return
    names = listed([track.name for track in far])
    low = [track for track in far if track.median * _FAR < usual]
    if low:
        most = min(low, key=lambda track: track.median)
        text = (
            f"the median norm of {printable(most.name)} is {most.median:.3g}, and one of ten {nouns(kind)}s has "
            f"more than {usual:.3g}"
        )
    else:
        most = min(far, key=lambda track: track.growth)
        text = f"{printable(most.name)} has shrunk from {most.first:.3g} to {_end(most):.3g}, and others have not"
    yield f"{_word('vanishing', kind)}: {names}; {text}"


def _noisy_ones(tracks: Sequence[Track]) -> list[Track]:
    known = [track for track in tracks if track.jitter >= 0 and len(track.steps) >= _LEAST_STEPS]
    if len(known) < _LEAST_COMPARED:
        return []
    usual, far = float(np.median([track.jitter for track in known])), _usual(tracks)
    # Rounding is all that is left of a gradient that is zero by mathematics.
    return [
        track
        for track in known
        if track.jitter > max(_NOISY, _NOISIER * usual) and track.median * _FAR > far
    ]


def _noisy(tracks: Sequence[Track], noisy: Sequence[Track], kind: str) -> Iterator[str]:
    if noisy:
        most = max(noisy, key=lambda track: track.jitter)
        usual = float(np.median([track.jitter for track in tracks if track.jitter >= 0]))
        yield (
            f"{_word('noisy', kind)}: {listed([track.name for track in noisy])}; from step to step the norm of "
            f"{printable(most.name)} changes {math.exp(most.jitter):.3g} times, that of others {math.exp(usual):.3g} times"
        )


def _levels(whole: Whole, params: int) -> Iterator[str]:
    known = np.isfinite(whole.values) & (whole.values > 0)
    steps, values = whole.steps[known][-_MOST_FOR_LEVELS:], whole.values[known][-_MOST_FOR_LEVELS:]
    if (change := change_of_level(steps, values)) is not None:
        word = "fell" if change.after < change.before else "rose"
        yield (
            f"level changed: the {whole_name(whole, params)} {word} from {change.before:.3g} to {change.after:.3g} at "
            f"step {change.step}, and stayed there"
        )
