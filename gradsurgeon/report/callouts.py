"""What stands out in the norms of a run, a sentence each, with the numbers that say so."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.history import History, Track, Whole
from gradsurgeon.report.rules_and_events import GRADIENT, OF_WEIGHTS, listed
from gradsurgeon.report.spikes import TIMES, Spike, change_of_level, largest_spikes

_DYING = 4  # steps before a tensor is 0 that tell a death from a training that converges
_DEATHS = 3
# Norms of the layers of one model lie within fewer orders of magnitude; of few layers none is unusual.
_FAR, _LEAST_COMPARED = 1e4, 4
# The usual norm of a kind: many layers may have vanished, and a few may be large.
_USUAL_SHARE = 0.9
# A module whose weight has so much more gradient than its bias: the gradient of the bias is zero by mathematics.
_SIBLING = 1e3
# Successive norms of a noisy tensor differ by a factor of 4, and by a power of 4 of that of others.
_NOISY, _NOISIER = math.log(4.0), 4.0
_LEAST_STEPS = 20
_MOST_FOR_LEVELS = 200_000


def callouts(history: History, params: int) -> Iterator[str]:
    for kind in history.kinds:
        tracks = history.of_kind(kind)
        compared = len(tracks) >= _LEAST_COMPARED
        far = _FAR * max(_usual(tracks), 1.0)
        exploded = [one for one in tracks if one.has_grown or (compared and one.median >= far)]
        names = {track.name for track in exploded}
        # Beside an explosion all else is small.
        others = [track for track in tracks if track.name not in names]
        noisy = _noisy_ones(tracks)
        # A noisy tensor has peaks all the time, and an explosion ends in one.
        loud = names | {track.name for track in noisy}
        wholes = history.gradients if kind == GRADIENT else []
        vanishing = _vanishing(tracks, others, kind) if compared and GRADIENT in kind else ""
        said = [
            ("non-finite", _nonfinite(tracks, kind)),
            ("exploding", _exploding(tracks, exploded, kind)),
            ("largest spike", _spike(tracks, loud, wholes, params)),
            *_dead(tracks),
            ("vanishing", vanishing),
            ("noisy", _noisy(tracks, noisy)),
            *(("level changed", _level(whole, params)) for whole in wholes),
        ]
        # Weights grow in healthy trainings, and how much an update moves says little by itself.
        for word, text in said[:1] if kind in OF_WEIGHTS else said:
            if text:
                of_kind = "" if kind == GRADIENT else f" ({kind})"
                yield f"{word}{of_kind}: {text}"


def whole_name(whole: Whole, params: int) -> str:
    number = len(whole.names)
    if number == 1:
        return f"norm of {printable(whole.names[0])}"
    return f"norm of {'all ' * (number == params)}{count(number, 'parameter')}"


def nouns(kind: str) -> str:
    return "parameter" if kind == GRADIENT else "tensor"


def _usual(tracks: Sequence[Track]) -> float:
    medians = [track.median for track in tracks if 0 < track.median < math.inf]
    return float(np.quantile(medians, _USUAL_SHARE)) if medians else math.nan


def _vanished(tracks: Sequence[Track], others: Sequence[Track], usual: float) -> list[Track]:
    largest: defaultdict[str, float] = defaultdict(float)
    for track in tracks:
        largest[_module(track)] = max(largest[_module(track)], track.median)
    # A training that converges shrinks all norms alike.
    growths = [track.growth for track in others if track.growth > 0]
    middle = float(np.median(growths)) if growths else math.nan
    return [
        track
        for track in tracks
        if track.median > 0
        and not (_is_bias(track) and track.median * _SIBLING < largest[_module(track)])
        and (track.median * _FAR < usual or track.growth * _FAR < min(1.0, middle))
    ]


def _noisy_ones(tracks: Sequence[Track]) -> list[Track]:
    known = [one for one in tracks if one.jitter >= 0 and int(one.there.sum()) >= _LEAST_STEPS]
    if len(known) < _LEAST_COMPARED:
        return []
    least = max(_NOISY, _NOISIER * float(np.median([track.jitter for track in known])))
    # Rounding is all that is left of a gradient that is zero by mathematics.
    usual = _usual(tracks)
    return [one for one in known if one.jitter > least and one.median * _FAR > usual]


def _module(track: Track) -> str:
    return track.name.rpartition(".")[0]


def _is_bias(track: Track) -> bool:
    return "bias" in track.name.rpartition(".")[2]


def _names(tracks: Sequence[Track]) -> str:
    return listed([track.name for track in tracks])


def _nonfinite(tracks: Sequence[Track], kind: str) -> str:
    bad = [track for track in tracks if track.nonfinite]
    if not bad:
        return ""
    first = min(track.nonfinite_steps[0] for track in bad)
    last = max(track.nonfinite_steps[1] for track in bad)
    names = _names([track for track in bad if track.nonfinite_steps[0] == first])
    text = f"{count(len(bad), nouns(kind))}, first at step {first}: {names}"
    is_over = all(math.isfinite(track.last) for track in bad)
    return f"{text}; until step {last}, finite again since" if is_over else text


def _exploding(tracks: Sequence[Track], far: Sequence[Track], kind: str) -> str:
    if not far:
        return ""
    grown = [track for track in far if track.has_grown]
    if not grown:
        most = max(far, key=lambda track: track.median)
        return (
            f"{_names(far)}; the median norm of {printable(most.name)} is {most.median:.3g}, and nine of ten "
            f"{nouns(kind)}s have less than {_usual(tracks):.3g}"
        )
    most = max(grown, key=lambda track: track.rise)
    begin = most.first if most.first > 0 else most.tops[most.tops > 0][0]
    text = (
        f"{printable(most.name)} grew from {begin:.3g} to {most.largest:.3g} at step {most.peak} "
        f"(last {most.last_finite:.3g})"
    )
    if most.nonfinite and most.nonfinite_steps[1] >= int(most.steps[~np.isnan(most.tops)][-1]):
        text += f", before it was non-finite at step {most.nonfinite_steps[0]}"
    return f"{_names(far)}; {text}"


def _spike(
    tracks: Sequence[Track], loud: Collection[str], wholes: Sequence[Whole], params: int
) -> str:
    quiet = [track for track in tracks if track.name not in loud]
    of_wholes: list[tuple[float, str]] = []
    for whole in wholes:
        if len(whole.names) == 1 or any(name in loud for name in whole.names):
            continue
        steps, tops = whole.steps[whole.bad == 0], whole.tops[whole.bad == 0]
        (found,) = largest_spikes(tops[None])
        if found is not None:
            spike = Spike(int(steps[found[0]]), float(tops[found[0]]), found[1])
            # Those that stand out from themselves, by their share of the whole.
            own = [track for track in quiet if track.name in whole.names]
            norms = {track.name: _norm_at(track, spike.step) for track in own}
            far = [track for track in own if norms[track.name] > TIMES * track.median]
            far.sort(key=lambda track: -norms[track.name])
            told = f"{_words(f'the {whole_name(whole, params)}', spike)}; most in {_names(far)}"
            of_wholes += [(spike.times, told)] * bool(far)
    spikes = [(one.spike.times, _words(one.name, one.spike)) for one in quiet if one.spike]
    return max(of_wholes or spikes, default=(0.0, ""))[1]


def _words(name: str, spike: Spike) -> str:
    return f"{printable(name)}, {spike.value:.3g} at step {spike.step}, {spike.times:.3g}x the steps before it"


def _norm_at(track: Track, step: int) -> float:
    """Return the norm of a step, or the largest of a few steps; 0 where there is none."""
    place = int(np.searchsorted(track.steps, step, side="right")) - 1
    return float(np.nan_to_num(track.tops[place])) if place >= 0 else 0.0


def _dead(tracks: Sequence[Track]) -> Iterator[tuple[str, str]]:
    alive = {_module(track) for track in tracks if track.largest > 0}
    zero = [one for one in tracks if one.largest == 0 and not one.nonfinite]
    zero = [one for one in zero if not (_is_bias(one) and _module(one) in alive)]
    yield "norm always exactly 0", _names(zero)
    since: defaultdict[int, list[Track]] = defaultdict(list)
    for track in tracks:
        if track.zero_since is not None and not _shrank_before(track, track.zero_since):
            since[track.zero_since].append(track)
    first = sorted(since)[:_DEATHS]
    for step in first:
        yield f"norm exactly 0 since step {step}, and until the end", _names(since[step])
    later = sum(len(some) for step, some in since.items() if step not in first)
    yield "norm exactly 0 until the end, since later steps", f"{later:,} more" if later else ""


def _shrank_before(track: Track, step: int) -> bool:
    """Tell whether a tensor was next to 0 for a while before it was 0, as in a training that converges to nothing."""
    # A layer that dies may pass through 1e-34 on its way.
    before = track.tops[track.steps < step][-_DYING:]
    return bool(len(before)) and bool(np.nanmax(before, initial=0.0) * _FAR < track.first)


def _vanishing(tracks: Sequence[Track], others: Sequence[Track], kind: str) -> str:
    usual = _usual(others)
    far = sorted(_vanished(tracks, others, usual), key=lambda track: track.median)
    if not far:
        return ""
    if far[0].median * _FAR < usual:
        text = (
            f"the median norm of {printable(far[0].name)} is {far[0].median:.3g}, and one of ten {nouns(kind)}s has "
            f"more than {usual:.3g}"
        )
    else:
        most = min(far, key=lambda track: track.growth)
        text = f"{printable(most.name)} has shrunk from {most.first:.3g} to {most.last_finite:.3g}, and others have not"
    return f"{_names(far)}; {text}"


def _noisy(tracks: Sequence[Track], noisy: Sequence[Track]) -> str:
    if not noisy:
        return ""
    most = max(noisy, key=lambda track: track.jitter)
    usual = float(np.median([track.jitter for track in tracks if track.jitter >= 0]))
    return (
        f"{_names(noisy)}; from step to step the norm of {printable(most.name)} changes {math.exp(most.jitter):.3g} "
        f"times, that of others {math.exp(usual):.3g} times"
    )


def _level(whole: Whole, params: int) -> str:
    known = np.flatnonzero(whole.tops > 0)[-_MOST_FOR_LEVELS:]
    if (change := change_of_level(whole.steps[known], whole.tops[known])) is None:
        return ""
    step, before, after = change
    word = "fell" if after < before else "rose"
    name = whole_name(whole, params)
    return f"the {name} {word} from {before:.3g} to {after:.3g} at step {step}, and stayed there"
