"""What stands out in the norms of a run, a sentence each, with the numbers that say so."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from gradsurgeon.common._grouping import names_of
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.report.band import EXPLODING, NONFINITE, PASSED, Callout
from gradsurgeon.report.history import History, WholeNorm
from gradsurgeon.report.rules_and_events import GRADIENT, OF_WEIGHTS, STATE, listed
from gradsurgeon.report.spikes import TIMES, Spike, largest_spike, raised_level
from gradsurgeon.report.track import Track

_DYING = 4  # steps before a tensor is 0 that tell a death from a training that converges
# Norms of the layers of one model lie within fewer orders of magnitude; of few layers none is unusual.
_FAR = 1e4
_LEAST_COMPARED = 4
# The usual norm of a kind: many layers may have vanished, and a few may be large.
_USUAL_SHARE = 0.9
# A module whose weight has so much more gradient than its bias: the gradient of the bias is zero by mathematics.
_SIBLING = 1e3


def callouts(history: History, params: int) -> Iterator[Callout]:
    """Yield what stands out, a sentence each."""
    for kind in history.kinds:
        of_kind = ""
        if kind != GRADIENT:
            of_kind = f" ({kind})"
        for word, text in _callouts_of(history, kind, params):
            if text:
                shown = NONFINITE if word == PASSED else word
                yield Callout(word, f"{shown}{of_kind}: {text}")


def _callouts_of(history: History, kind: str, params: int) -> Iterator[tuple[str, str]]:
    tracks = history.tracks_of(kind)
    yield _nonfinite(tracks, kind)
    # Weights grow in healthy trainings, and how much an update moves says little by itself.
    if kind in OF_WEIGHTS or kind.startswith(STATE):
        return
    grown = []
    others = []
    for track in tracks:
        # Beside an explosion all else is small.
        if track.has_grown:
            grown.append(track)
        else:
            others.append(track)
    yield EXPLODING, _exploding(grown)
    spike = ""
    if kind == GRADIENT:
        spike = _spike_of_wholes(history.gradients, others, params)
    if not spike:
        spike = _spike(others)
    yield "largest spike", spike
    yield "higher for a while", _raised(others)
    yield from _dead(tracks)
    if GRADIENT in kind and len(tracks) >= _LEAST_COMPARED:
        yield "vanishing", _vanishing(tracks, others, kind)


def whole_name(whole: WholeNorm, params: int) -> str:
    number = len(whole.names)
    if number == 1:
        return f"norm of {printable(whole.names[0])}"
    tensors = count(number, "parameter")
    if number == params:
        tensors = f"all {tensors}"
    return f"norm of {tensors}"


def nouns(kind: str) -> str:
    return "parameter" if kind == GRADIENT else "tensor"


def _names(tracks: Sequence[Track]) -> str:
    return listed(names_of(tracks))


def _module(track: Track) -> str:
    return track.name.rpartition(".")[0]


def _is_bias(track: Track) -> bool:
    return "bias" in track.name.rpartition(".")[2]


def _nonfinite(tracks: Sequence[Track], kind: str) -> tuple[str, str]:
    bad = [track for track in tracks if len(track.nonfinite_steps)]
    if not bad:
        return NONFINITE, ""
    bad.sort(key=lambda track: track.nonfinite_steps[0])
    firsts = [track.nonfinite_steps[0] for track in bad]
    number = firsts.count(firsts[0])
    text = f"{count(len(bad), nouns(kind))}, "
    if number < len(bad):
        text += f"{number} of them "
    text += f"first at step {firsts[0]}: {_names(bad[:number])}"
    if all(math.isfinite(track.last) for track in bad):
        last = max(track.nonfinite_steps[-1] for track in bad)
        return PASSED, f"{text}; until step {last}, finite again since"
    return NONFINITE, text


def _exploding(grown: Sequence[Track]) -> str:
    if not grown:
        return ""
    most = max(grown, key=attrgetter("rise"))
    norms = most.finite_norms
    begin = norms[norms > 0][0]
    peak = most.finite_steps[norms.argmax()]
    text = f"{_names(grown)}; {printable(most.name)} grew from {begin:.3g} to {most.largest:.3g} at step {peak}"
    if len(most.nonfinite_steps):
        return f"{text}, and was non-finite at step {most.nonfinite_steps[0]}"
    return f"{text} (last {norms[-1]:.3g})"


def _spike(tracks: Sequence[Track]) -> str:
    spikes = [(track.spike.times, track.name, track.spike) for track in tracks if track.spike]
    if not spikes:
        return ""
    return _spike_text(*max(spikes)[1:])


def _spike_of_wholes(wholes: Sequence[WholeNorm], tracks: Sequence[Track], params: int) -> str:
    """Return the largest spike of the norms of several tensors, with the tensors that stand out in that step."""
    calm = {track.name: track for track in tracks}
    largest = 0.0
    text = ""
    for whole in wholes:
        if len(whole.names) == 1 or not calm.keys() >= {*whole.names}:
            continue
        is_finite = np.isfinite(whole.norms)
        spike = largest_spike(whole.steps[is_finite], whole.norms[is_finite])
        if spike is None or spike.times < largest:
            continue
        far = {}
        for name in whole.names:
            track = calm[name]
            norm = track.norms[track.steps <= spike.step][-1]
            if norm > TIMES * track.median:
                far[track] = norm
        if far:
            largest = spike.times
            # By their share of the whole.
            names = _names(sorted(far, key=far.__getitem__, reverse=True))
            text = f"{_spike_text(f'the {whole_name(whole, params)}', spike)}; most in {names}"
    return text


def _raised(tracks: Sequence[Track]) -> str:
    """Return which tensor's norms were at a far higher level for many steps, and then were not."""
    for track in tracks:
        level = raised_level(track.finite_steps, track.finite_norms, track.median)
        if level is not None:
            first, last, times = level
            return f"{printable(track.name)}, about {times:.2g}x its median from step {first} to {last}"
    return ""


def _spike_text(name: str, spike: Spike) -> str:
    return f"{printable(name)}, {spike.value:.3g} at step {spike.step}, {spike.times:.3g}x the steps before it"


def _dead(tracks: Sequence[Track]) -> Iterator[tuple[str, str]]:
    alive = {_module(track) for track in tracks if track.largest > 0}
    zero = []
    died = []
    for track in tracks:
        is_zero = track.largest == 0 and not len(track.nonfinite_steps)
        is_inert_bias = _is_bias(track) and _module(track) in alive
        if is_zero and not is_inert_bias:
            zero.append(track)
        if track.zero_since is None:
            continue
        # A training that converges to nothing is next to 0 for a while. A layer that dies may pass through 1e-34 on its way.
        before = track.finite_norms[track.finite_steps < track.zero_since][-_DYING:]
        has_shrunk = before.max(initial=0.0) * _FAR < track.first
        if not has_shrunk:
            died.append(track)
    yield "norm always exactly 0", _names(zero)
    if died:
        died.sort(key=attrgetter("zero_since"))
        since = f"step {died[0].zero_since}"
        if died[-1].zero_since != died[0].zero_since:
            since += " or later"
        yield f"norm exactly 0 since {since}, and until the end", _names(died)


def _vanishing(tracks: Sequence[Track], others: Sequence[Track], kind: str) -> str:
    medians = [track.median for track in others if 0 < track.median < math.inf]
    if not medians:
        return ""
    usual = float(np.quantile(medians, _USUAL_SHARE))
    largest: defaultdict[str, float] = defaultdict(float)
    for track in tracks:
        module = _module(track)
        largest[module] = max(largest[module], track.median)
    small = []
    for track in tracks:
        # A bias before a batch norm has next to no gradient beside its weight.
        is_zero = _is_bias(track) and track.median * _SIBLING < largest[_module(track)]
        if 0 < track.median * _FAR < usual and not is_zero:
            small.append(track)
    if not small:
        return ""
    small.sort(key=attrgetter("median"))
    return (
        f"{_names(small)}; the median norm of {printable(small[0].name)} is {small[0].median:.3g}, and one of ten "
        f"{nouns(kind)}s has more than {usual:.3g}"
    )
