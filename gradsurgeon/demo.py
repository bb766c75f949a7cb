"""The main job from end to end: ``python -m gradsurgeon.demo``.

Trains a small convolutional network on scikit-learn's handwritten digits with the rules of
``rules/quickstart.yaml``. At one step a fault is injected: the data are fine, but the backward of one
layer produces a NaN. The trap must name the step and the layer and keep the NaN out of every weight
and every moment of the optimizer. The exit code is 0 if it did and the network learnt to read.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gradsurgeon
from gradsurgeon import packs, report
from gradsurgeon.errors import GradSurgeonError, NonFiniteGradientError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradsurgeon.runtime import Session

EPOCHS = 10
LEAST_EPOCHS = 4
BATCH = 32
SEED = 0
GOAL = 0.95
# In the third epoch: the moments of AdamW are warm, and enough steps follow to see training go on.
FAULT_STEP = 100
# The border that the trap has to find, in the order of backward.
LAST_FINITE = "fc1.weight"
FIRST_NONFINITE = "conv2.weight"

_WIPE = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Digits:
    """Standardised images of shape ``[n, 1, 8, 8]`` with their labels, in two disjoint parts."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(slots=True)
class Outcome:
    """What the run has to show in the end."""

    accuracy: float = 0.0
    moved_at_fault: int | None = None
    still_after: int = 0
    stopped: str = ""


def build() -> nn.Module:
    """Return the network; ``gradsurgeon plan --model gradsurgeon.demo:build`` finds it here."""
    import torch  # noqa: PLC0415 # without torch, say what to install
    from torch import nn  # noqa: PLC0415 # as above

    class Poison(torch.autograd.Function):
        """The identity, whose backward makes one element of the gradient NaN."""

        @staticmethod
        def forward(_: object, features: Tensor) -> Tensor:
            return features.view_as(features)

        @staticmethod
        def backward(_: object, *grads: Tensor) -> Tensor:
            poisoned = grads[0].clone()
            poisoned[0, 0, 0, 0] = float("nan")
            return poisoned

    class Fault(nn.Module):
        """Fault injection: an identity that poisons its backward while it is armed."""

        armed = False

        def forward(self, features: Tensor) -> Tensor:
            if not self.armed:
                return features
            return cast("Tensor", Poison.apply(features))  # type: ignore[no-untyped-call]

    class DigitsNet(nn.Module):
        """Two convolutions, two linear layers, and the fault right behind the second one."""

        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fault = Fault()
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.conv1(images).relu()
            # Before the ReLU: behind it, the NaN could fall on an element that ReLU blocks.
            hidden = self.fault(self.conv2(hidden)).relu()
            hidden = nn.functional.max_pool2d(hidden, 2).flatten(1)
            return cast("Tensor", self.fc2(self.fc1(hidden).relu()))

    return DigitsNet()


def load_digits() -> Digits:
    """Return the digits, split with a fixed seed."""
    import torch  # noqa: PLC0415 # as above
    from sklearn import datasets, model_selection  # noqa: PLC0415 # as above

    found = datasets.load_digits()
    parts = model_selection.train_test_split(
        found.images, found.target, test_size=0.25, random_state=SEED, stratify=found.target
    )
    train, test = (torch.as_tensor(part, dtype=torch.float32)[:, None] for part in parts[:2])
    train_labels, test_labels = (torch.as_tensor(part, dtype=torch.int64) for part in parts[2:])
    # Mean and spread of the training part only: the test part must stay unseen.
    mean, std = train.mean(), train.std()
    return Digits((train - mean) / std, train_labels, (test - mean) / std, test_labels)


def default_rules() -> Path:
    """Return the quickstart rules."""
    return packs.folder() / "quickstart.yaml"


class Progress:
    """The line that shows training going on: rewritten in a terminal, one per epoch elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def step(self, text: str) -> None:
        """Show a step, where lines can be rewritten."""
        if self._live:
            print(f"{_WIPE}{text}", end="", file=sys.stderr, flush=True)

    def epoch(self, text: str) -> None:
        """Show the end of an epoch for good."""
        print(f"{_WIPE if self._live else ''}{text}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for something else."""
        if self._live:
            print(_WIPE, end="", file=sys.stderr, flush=True)


class Trainer:
    """Plain training; what the rules do happens inside ``backward()`` and ``optimizer.step()``."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, digits: Digits, session: Session
    ) -> None:
        self.model, self.optimizer, self.digits = model, optimizer, digits
        self.session = session
        self.progress = Progress()
        self.outcome = Outcome()
        self._step = 0
        self._told = 0

    def run(self, epochs: int) -> None:
        """Train, reporting every epoch, and every trap when it trips."""
        steps = epochs * -(-len(self.digits.train_labels) // BATCH)
        for epoch in range(1, epochs + 1):
            loss = 0.0
            for images, labels in self._batches():
                loss = self._train(images, labels)
                self.progress.step(f"epoch {epoch}  step {self._step}/{steps}  loss {loss:.4f}")
            self.outcome.accuracy = self._accuracy()
            self.progress.epoch(
                f"epoch {epoch:>2}/{epochs}  step {self._step}/{steps}  loss {loss:.4f}  "
                f"test accuracy {100 * self.outcome.accuracy:.1f} %"
            )

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        import torch  # noqa: PLC0415 # as above

        order = torch.randperm(len(self.digits.train_labels))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            yield self.digits.train_images[chosen], self.digits.train_labels[chosen]

    def _train(self, images: Tensor, labels: Tensor) -> float:
        from torch.nn import functional  # noqa: PLC0415 # as above

        faulty = self._step == FAULT_STEP
        cast("Any", self.model).fault.armed = faulty
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        before = self._snapshot() if self._step in (FAULT_STEP, FAULT_STEP + 1) else []
        self.optimizer.step()
        self._tell()
        if before:
            self._compare(before, faulty=faulty)
        self._step += 1
        return float(loss.detach())

    def _snapshot(self) -> list[Tensor]:
        """Copy every weight and the optimizer's state of it: exp_avg, exp_avg_sq, step."""
        return [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> Iterator[Tensor]:
        for param in self.model.parameters():
            yield param
            yield from self.optimizer.state[param].values()

    def _compare(self, before: Sequence[Tensor], *, faulty: bool) -> None:
        after = self._snapshot()
        # Bytes, because a NaN that stayed what it was is not equal to itself.
        moved = sum(
            one.numpy().tobytes() != two.numpy().tobytes()
            for one, two in zip(before, after, strict=True)
        )
        self.progress.clear()
        if not faulty:
            self.outcome.still_after = len(before) - moved
            say(f"the step after it: {moved} of {len(before)} tensors moved, training goes on\n")
            return
        self.outcome.moved_at_fault = moved
        what = "no weight or moment moved" if not moved else f"{moved} WEIGHTS OR MOMENTS MOVED"
        say(f"step {self._step}: {what}: checked {len(before)} tensors, bit by bit")

    def _tell(self) -> None:
        """Print the traps that have tripped since the last step."""
        events = self.session.events
        for event in events[self._told :]:
            if event.kind == "trap":
                self.progress.clear()
                say(f"\nTRAP {event.message}\n")
        self._told = len(events)

    def _accuracy(self) -> float:
        import torch  # noqa: PLC0415 # as above

        with torch.no_grad():
            found = self.model(self.digits.test_images).argmax(1)
        return float((found == self.digits.test_labels).float().mean())


def say(text: str) -> None:
    """Print at once, so that the order stands where both streams end in one file."""
    print(text, flush=True)


def failures(outcome: Outcome, session: Session) -> list[str]:
    """Return what went otherwise than the demo has to show."""
    found = [outcome.stopped] if outcome.stopped else []
    traps = [event for event in session.events if event.kind == "trap"]
    if [(event.step, event.name) for event in traps] != [(FAULT_STEP, FIRST_NONFINITE)]:
        seen = ", ".join(f"{event.name} at step {event.step}" for event in traps) or "none tripped"
        found.append(f"one trap was to trip, on {FIRST_NONFINITE} at step {FAULT_STEP}: {seen}")
    if outcome.moved_at_fault:
        found.append(
            f"{outcome.moved_at_fault} weights or moments moved at step {FAULT_STEP}, whose "
            "gradients are not finite"
        )
    if outcome.still_after:
        found.append(
            f"{outcome.still_after} tensors did not move at step {FAULT_STEP + 1} either, so that "
            "they prove nothing"
        )
    if outcome.accuracy < GOAL:
        found.append(f"test accuracy {100 * outcome.accuracy:.1f} % is below {100 * GOAL:.0f} %")
    return found


def demonstrate(rules: Path, epochs: int) -> int:
    """Run the demo and return the exit code."""
    import torch  # noqa: PLC0415 # as above

    # The tensors are tiny, and in a container torch sees more cores than it may use.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    digits = load_digits()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            say(f"{session.plan}\n")
            trainer = Trainer(model, optimizer, digits, session)
            try:
                trainer.run(epochs)
            except NonFiniteGradientError as error:
                trainer.progress.clear()
                trainer.outcome.stopped = f"a trap stopped the training: {error}"
    found = report.summary(session)
    say(f"\n{found.text(ascii_only=report.needs_ascii(sys.stdout.encoding))}\n")
    for warning in warned:
        say(f"warning: {warning.message}")
    wrong = failures(trainer.outcome, session)
    for text in wrong:
        say(f"FAILED: {text}")
    say(
        f"{'failed' if wrong else 'done'}: test accuracy {100 * trainer.outcome.accuracy:.1f} %, "
        f"{len(warned)} warning{'' if len(warned) == 1 else 's'}"
    )
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(prog="python -m gradsurgeon.demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="default: %(default)s")
    parser.add_argument("--rules", type=Path, default=default_rules(), help="a rule file")
    given = parser.parse_args(argv)
    if given.epochs < LEAST_EPOCHS:
        parser.error(f"--epochs: {LEAST_EPOCHS} at least, the fault comes in the third")
    try:
        return demonstrate(given.rules, given.epochs)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "sklearn", "numpy"):
            raise
        print(f"{error}; the demo needs: pip install 'gradsurgeon[demo]'", file=sys.stderr)
    except GradSurgeonError as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
