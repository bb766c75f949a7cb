"""What a bad batch does to a run, under bounds that are fixed and bounds that learn: ``python -m benchmarks.spikes``.

An LSTM learns 8,000 characters of English by heart. On the way the norm of its gradient falls to less than a
tenth. Every 300 steps comes a bad batch: a file is broken, and from some place on its text is one letter over and
over. How much of the batch is broken is chosen in a run without bad batches, so that the norm there is about 20
times the usual; from then on the batches are the same for every variant.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses

import gradsurgeon
from benchmarks import spikes_page
from gradsurgeon.actions import Spikes

STEPS, EVERY, TIMES = 3000, 300, 20
BATCH, CONTEXT, GUESSED = 16, 20, 50  # the first characters of a text are read and not guessed
TEXT, WIDTH = 8_000, 128
LEARNING_RATE, WARM_UP = 4.0, 100
_BAD = range(EVERY, STEPS, EVERY)
_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 400, 600, BATCH * GUESSED)
# The norms of all gradients, before and after what a variant does.
_BEFORE = '{id: before, action: norm-log, params: "*"}'
_AFTER = '{id: after, action: norm-log, params: "*", at: step}'
SIGMAS = '{id: spikes, action: spike-trap, params: "*", above: {sigmas: 2.5}}'
TIMES_OF_MEAN = (
    '{id: spikes, action: spike-trap, params: "*", above: {times: 1.05}, per: parameter}'
)
WIDER = '{id: spikes, action: spike-trap, params: "*", above: {times: 3}}'


class Writer(nn.Module):
    """Guesses each character from those before it."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, 32)
        self.lstm = nn.LSTM(32, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(x))[0][:, CONTEXT:])
        return out


class Texts:
    """What scikit-learn says of its data sets, cut into texts, of which a batch takes some at random."""

    def __init__(self) -> None:
        named = ("iris", "digits", "wine", "breast_cancer", "diabetes")
        text = "\n".join(getattr(datasets, f"load_{name}")().DESCR for name in named)[:TEXT]
        self.letters = sorted(set(text))
        numbers = torch.tensor([self.letters.index(letter) for letter in text])
        self.texts = numbers.unfold(0, CONTEXT + GUESSED + 1, GUESSED)
        self.rarest = numbers.bincount().argsort().tolist()

    def healthy(self, step: int) -> Tensor:
        chosen = torch.Generator().manual_seed(step)
        return self.texts[torch.randint(0, len(self.texts), (BATCH,), generator=chosen)]

    def bad(self, step: int, size: int) -> Tensor:
        """Return the batch of a step with so many of its characters broken, text after text."""
        batch, letter = self.healthy(step), self.rarest[step // EVERY]
        whole, rest = divmod(size, GUESSED)
        batch[:whole] = letter
        if rest:
            batch[whole, -rest:] = letter
        return batch


@dataclass(frozen=True, slots=True)
class Trained:
    """One run: by step the loss, and the norms of the gradients as the script and as the rules hand them over."""

    losses: list[float]
    before: Tensor  # [steps, parameters]
    after: Tensor
    seconds: float
    sizes: dict[int, int]  # of the bad batches

    @property
    def norms(self) -> list[float]:
        found: list[float] = torch.linalg.vector_norm(self.before, dim=1).tolist()
        return found


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, CONTEXT + 1 :].flatten())


def train(rule: str, sizes: Mapping[int, int] | None) -> Trained:
    """Train under a rule; without ``sizes`` on healthy batches alone, and find the sizes of bad ones."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts, losses, chosen, begin = Texts(), [], {}, time.monotonic()
    model = Writer(len(texts.letters))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _pace)
    rules = "\n  - ".join(filter(None, ("version: 1\nrules:", _BEFORE, rule, _AFTER)))
    with gradsurgeon.apply(model, rules) as session:
        for step in range(STEPS):
            batch = texts.healthy(step)
            if step in _BAD and sizes is not None:
                batch = texts.bad(step, sizes[step])
            elif step in _BAD:
                norms = [math.hypot(*row) for row in _recent(session, step)]
                chosen[step] = _size(model, texts, step, TIMES * median(norms))
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch has no types there
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        before, after = (_table(session, which) for which in ("before", "after"))
    return Trained(losses, before, after, time.monotonic() - begin, dict(sizes or chosen))


def _pace(step: int) -> float:
    """Return the share of the learning rate: a warm-up, then a cosine down to a hundredth."""
    return min(1, (step + 1) / WARM_UP) * (0.505 + 0.495 * math.cos(math.pi * step / STEPS))


def _table(session: gradsurgeon.Session, rule: str) -> Tensor:
    names = [one.name for one in session.plan.of(rule)]
    histories = [[value for _, value in session.history(name, rule=rule)] for name in names]
    return torch.tensor(histories, dtype=torch.float64).T


def _recent(session: gradsurgeon.Session, step: int) -> list[list[float]]:
    rows: list[list[float]] = _table(session, "before")[step - 50 : step].tolist()
    return rows


def _size(model: nn.Module, texts: Texts, step: int, wanted: float) -> int:
    """Return how many characters of a batch to break, for a norm as near as possible to the one wanted."""
    twin, found = copy.deepcopy(model), []  # copies carry no rules
    for size in _SIZES:
        twin.zero_grad()
        loss_of(twin, texts.bad(step, size)).backward()  # type: ignore[no-untyped-call] # as above
        norm = nn.utils.get_total_norm(
            [one.grad for one in twin.parameters() if one.grad is not None]
        )
        found.append((abs(math.log(norm.item() / wanted)), size))
    return min(found)[1]


def summary(name: str, rule: str, run: Trained, *, bad: Sequence[int]) -> dict[str, Any]:
    """Return what is said of one run."""
    touched = run.after < run.before * (1 - 1e-6)
    healthy = torch.tensor([step not in bad for step in range(STEPS)])
    rises, waits = zip(*(_harm(run.losses, step) for step in _BAD), strict=True)
    norms = run.norms
    return {
        "name": name,
        "rule": rule,
        "final_loss": round(mean(run.losses[-100:]), 4),
        "worst_rise": round(max(rises), 2),
        "recovered": round(mean(waits), 1),
        "healthy_steps_touched": round(touched[healthy].any(1).double().mean().item(), 4),
        "healthy_gradients_touched": round(touched[healthy].double().mean().item(), 4),
        "bad_caught": int(touched[list(bad)].any(1).sum()) if bad else None,
        "bad_times": [round(norms[one] / median(norms[one - 50 : one]), 1) for one in bad],
        "bad_norms": [float(f"{norms[one]:.3g}") for one in bad],
        "seconds": round(run.seconds),
        "losses": _by_tens(run.losses, bad),
        "norms": _by_tens(norms, bad),
    }


def _harm(losses: Sequence[float], bad: int) -> tuple[float, int]:
    """Return how many times the usual the loss rose after a bad batch, and the steps until it was usual again.

    Usual is the mean of the 50 steps before; again so is the first mean of ten steps not above it by a tenth.
    """
    usual, after = mean(losses[bad - 50 : bad]), losses[bad + 1 : bad + EVERY]
    means = [mean(after[step : step + 10]) for step in range(len(after) - 9)]
    waited = next((step for step, one in enumerate(means) if one <= 1.1 * usual), len(means))
    return max(after[:10]) / usual, waited


def _by_tens(values: Sequence[float], bad: Sequence[int]) -> list[float]:
    """Return the means of ten steps each, without the bad batches."""
    return [
        float(f"{mean(values[step] for step in range(first, first + 10) if step not in bad):.3g}")
        for first in range(0, len(values), 10)
    ]


def learnt_bounds(run: Trained, rule: str) -> list[float | None]:
    """Return the bound of a `spike-trap` over one norm before each step, by the norms that the run has had."""
    (parsed,) = gradsurgeon.load(f"version: 1\nrules:\n  - {rule}\n").rules
    spikes = parsed.compile()
    assert isinstance(spikes, Spikes)
    kept, found = torch.zeros(spikes.bound.rows, 1, dtype=torch.float64), []
    for norm in run.norms:
        bound = spikes.bound.bounds(kept[:, 0].tolist())
        found.append(None if bound is None else float(f"{bound[0]:.3g}"))
        _, kept = spikes.bound.advance(kept, torch.tensor([norm], dtype=torch.float64))
    return found[::10]


def measure() -> dict[str, Any]:
    """Run all variants, one after the other, and return what is said of them."""
    reference = train("", None)
    norms = reference.norms
    medians = [median(norms[first : first + 100]) for first in range(0, STEPS, 100)]
    first, last = (quantiles(part, n=100)[98] for part in (norms[:EVERY], norms[-EVERY:]))
    clip = '{{id: bound, action: clip-norm, params: "*", per: rule, max_norm: {:.2g}}}'
    variants = {
        "no bound": "",
        f"`max_norm: {first:.2g}`, by the first tenth": clip.format(first),
        f"`max_norm: {last:.2g}`, by the last tenth": clip.format(last),
        "`sigmas: 2.5` (ZClip)": SIGMAS,
        "`times: 1.05`, per parameter (AdaGC)": TIMES_OF_MEAN,
        "`times: 3`": WIDER,
    }
    rows, bounds = [summary("no bound, and no bad batches", "", reference, bad=())], []
    for name, rule in variants.items():
        run = train(rule, reference.sizes)
        rows.append(summary(name, rule, run, bad=_BAD))
        print(rows[-1] | {"losses": "", "norms": ""}, file=sys.stderr, flush=True)
        if rule == SIGMAS:
            bounds = learnt_bounds(run, rule)
    return {
        "torch": str(torch.__version__),
        "drift": round(max(medians) / min(medians), 1),
        "fixed": [float(f"{first:.2g}"), float(f"{last:.2g}")],
        "sizes": list(reference.sizes.values()),
        "learnt": {"rule": SIGMAS, "bounds": bounds},
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or only draw what is committed; write the results, the picture, and the table of the guide."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spikes", description=__doc__)
    parser.add_argument(
        "--render", action="store_true", help="only draw and write anew from the committed results"
    )
    if not parser.parse_args(argv).render:
        spikes_page.RESULTS.write_text(spikes_page.dumps(measure()), encoding="utf-8")
    found = json.loads(spikes_page.RESULTS.read_text(encoding="utf-8"))
    spikes_page.draw(found, spikes_page.PICTURE)
    guide = spikes_page.GUIDE.read_text(encoding="utf-8")
    spikes_page.GUIDE.write_text(spikes_page.with_table(guide, found), encoding="utf-8")
    print(spikes_page.table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
