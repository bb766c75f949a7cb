"""The main job from end to end: ``python -m gradsurgeon.demo``.

Trains a small network on scikit-learn's digits with ``rules/quickstart.yaml``, and masks a square root of negative
numbers at one step, which becomes NaN in the backward pass. The trap names the step and the line, and keeps the
NaN out of every weight and every moment of the optimizer. The demo writes a page of the run, and a bundle.
"""

import argparse
import io
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

import gradsurgeon
from gradsurgeon import packs, report
from gradsurgeon.errors import GradSurgeonError

EPOCHS = 10
BATCH = 32
SEED = 0
# In the third epoch the moments of AdamW are warm, and enough steps follow to show that training continues.
FAULT_STEP = 100


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, with a fault while ``armed``."""

    armed: Tensor

    def __init__(self) -> None:
        super().__init__()
        # A bundle of a failed step holds the buffers, so `replay` finds the fault armed.
        self.register_buffer("armed", torch.tensor(False), persistent=False)
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv1(images).relu()
        hidden = self.conv2(hidden)
        if self.armed:
            # Every output is finite, but the gradient of a masked element is 0 x NaN.
            hidden = torch.where(hidden > 0, hidden.sqrt(), hidden)
        hidden = functional.max_pool2d(hidden.relu(), 2).flatten(1)
        return cast("Tensor", self.fc2(self.fc1(hidden).relu()))


def build() -> nn.Module:
    """Return the network; ``gradsurgeon plan --model gradsurgeon.demo:build`` finds it here."""
    return DigitsNet()


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return standardised images of shape ``[n, 1, 8, 8]`` and labels, for training and for the test."""
    try:
        from sklearn import datasets, model_selection  # noqa: PLC0415 # `plan --model` does not need it
    except ModuleNotFoundError as error:
        raise GradSurgeonError(f"{error}: pip install 'gradsurgeon[demo]'") from error
    digits = datasets.load_digits()
    train, test, train_labels, test_labels = model_selection.train_test_split(
        digits.images, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target
    )
    train, test = (torch.as_tensor(part, dtype=torch.float32)[:, None] for part in (train, test))
    # Mean and spread come from the training part only: the test part must stay unseen.
    mean, std = train.mean(), train.std()
    labels = [torch.as_tensor(part, dtype=torch.int64) for part in (train_labels, test_labels)]
    return (train - mean) / std, labels[0], (test - mean) / std, labels[1]


def default_rules() -> Path:
    return packs.folder() / "quickstart.yaml"


class Trainer:
    """Plain training: the rules act inside ``backward()`` and ``optimizer.step()``."""

    def __init__(self, model: DigitsNet) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def run(self, epochs: int) -> float:
        images, labels, test_images, test_labels = load_digits()
        step, accuracy = 0, 0.0
        for epoch in range(1, epochs + 1):
            for chosen in torch.split(torch.randperm(len(labels)), BATCH):
                loss = self._train(step, images[chosen], labels[chosen])
                step += 1
            with torch.no_grad():
                predicted = self.model(test_images).argmax(1)
            accuracy = 100 * float((predicted == test_labels).float().mean())
            text = f"epoch {epoch:>2}/{epochs}  step {step}  loss {float(loss):.4f}"
            print(f"{text}  test accuracy {accuracy:.1f} %", file=sys.stderr, flush=True)
        return accuracy

    def _train(self, step: int, images: Tensor, labels: Tensor) -> Tensor:
        self.model.armed.fill_(step == FAULT_STEP)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        before = self._snapshot()
        self.optimizer.step()  # the trap looks
        moved = sum(old != new for old, new in zip(before, self._snapshot(), strict=False))
        if step == FAULT_STEP:
            well = "the trap skipped the update, and no weight or moment moved"
            what = f"{moved} WEIGHTS OR MOMENTS MOVED" if moved else well
            say(f"step {step}: {what}: checked {len(before)} tensors, bit by bit")
        elif step == FAULT_STEP + 1:
            say(f"the next step: {moved} of {len(before)} tensors moved, training continues\n")
        return loss.detach()

    def _snapshot(self) -> list[bytes]:
        """Copy every weight and its state in the optimizer: exp_avg, exp_avg_sq, step."""
        # As bytes, because an unchanged NaN is not equal to itself.
        return [
            tensor.detach().numpy().tobytes()
            for param in self.model.parameters()
            for tensor in (param, *self.optimizer.state[param].values())
        ]


def say(text: str) -> None:
    """Print at once, which keeps the order if both streams go to one file."""
    print(text, flush=True)


def demonstrate(epochs: int, folder: Path) -> None:
    from gradsurgeon.report.web_page import write_page  # noqa: PLC0415 # needs SQLite

    # The tensors are tiny, and in a container torch sees more cores than it may use.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    # The report ends in what the trap would log as well.
    logging.getLogger("gradsurgeon").setLevel(logging.ERROR)
    trainer, run = Trainer(DigitsNet()), folder / "run"
    with gradsurgeon.apply(
        trainer.model, default_rules(), optimizer=trainer.optimizer, record=run
    ) as session:
        say(
            f"This demo trains a small network to read digits, and breaks it at step {FAULT_STEP}: a square root of "
            "negative numbers, masked in\nthe forward pass, becomes NaN in the backward pass.\n"
        )
        say(f"{session.plan}\n")
        accuracy = trainer.run(epochs)
    say(f"\n{report.summary(session)}\n")
    write_page([run], folder / "report.html")
    say(f"The run as a page: {folder / 'report.html'}")
    say(f"done: test accuracy {accuracy:.1f} %")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradsurgeon.demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="default: %(default)s")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to write the run and its page; default: a new temporary folder",
    )
    given = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        demonstrate(
            given.epochs, given.folder or Path(tempfile.mkdtemp(prefix="gradsurgeon-demo-"))
        )
    except GradSurgeonError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
