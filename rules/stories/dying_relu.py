"""A network learns to read digits, until its learning rate has risen too far and a whole layer of ReLUs dies.

The learning rate is warmed up, which is right, to a peak that is too high for this network. One update throws
a layer so far below zero that none of its units answers to any image again. From then on nothing flows back
through it: its gradients, and those of all layers before it, are exactly 0 and stay so.

    python rules/stories/dying_relu.py        # ten seconds; writes dying_relu.html
"""

import sys

import story
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradsurgeon

STEPS, BATCH, WIDTH = 300, 64, 32
PEAK, WARM_UP = 0.5, 160
TRAINED = 1500  # of 1797 images; the others are there to test with


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.relu1 = nn.Linear(64, WIDTH), nn.ReLU()
        self.fc2, self.relu2 = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.fc3, self.relu3 = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.fc4 = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.relu1(self.fc1(x))
        x = self.relu2(self.fc2(x))
        return self.fc4(self.relu3(self.fc3(x)))


def train(mode, record):
    """Train, and return the losses and the share of the test images that are read rightly."""
    story.repeatable()
    digits = load_digits()
    images = torch.as_tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.as_tensor(digits.target)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP)
    )
    losses = []
    with gradsurgeon.apply(model, story.HERE / "dying_relu.yaml", mode=mode, record=record):
        for _ in range(STEPS):
            chosen = torch.randint(0, TRAINED, (BATCH,))
            loss = gradsurgeon.tag(F.cross_entropy(model(images[chosen]), labels[chosen]), "loss")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm_up.step()
            losses.append(loss.item())
    # The rules are off: what is measured here is not recorded.
    with torch.no_grad():
        right = model(images[TRAINED:]).argmax(1) == labels[TRAINED:]
    return losses, right.float().mean().item()


def zero_since(pairs):
    """Return the step from which on a norm is exactly 0 until the end, or None."""
    alive = [step for step, value in pairs if value != 0]
    return None if alive and alive[-1] == pairs[-1][0] else max(alive, default=-1) + 1


def main():
    folder, html = story.files("dying_relu")
    without, with_clip = folder / "without-clip", folder / "with-clip"
    (losses, accuracy), (clipped, accuracy_clipped) = (
        train("observe", without),
        train("act", with_clip),
    )
    since = {
        name: zero_since(story.recorded(without, f"{name}.weight"))
        for name in ("fc1", "fc2", "fc3")
    }
    zeros = {
        name: story.recorded(without, name, stat="zeros")[-1][1]
        for name in ("relu1", "relu2", "relu3")
    }
    shares = {name: number / (BATCH * WIDTH) for name, number in zeros.items()}
    best = min(losses)
    print(
        f"run 1, without the clip: the loss falls to {best:.2f} at step {losses.index(best)}, and ends at {losses[-1]:.2f}"
    )
    print(f"  {accuracy:.0%} of the test images are read rightly; guessing makes 10%")
    print(
        "  gradients exactly 0 for good: "
        + ", ".join(f"{name} since step {step}" for name, step in since.items())
    )
    print(
        "  zeros among the outputs at the end: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    )
    print("run 2, with the clip, and all else as it was:")
    print(
        f"  the loss ends at {clipped[-1]:.2f}, and {accuracy_clipped:.0%} of the test images are read rightly"
    )
    died = None not in since.values() and best < 1 and accuracy < 0.2 and shares["relu3"] == 1
    return story.end(died and accuracy_clipped > 0.8, [without, with_clip], html)


if __name__ == "__main__":
    sys.exit(main())
