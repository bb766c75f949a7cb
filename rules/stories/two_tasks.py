"""A network learns to tell which digit an image shows and how much ink it took, and one of the two never arrives.

The ink is guessed in the units that it comes in, some hundreds, so that its loss is large. In the
trunk that both heads share its gradient drowns the other one: the digits are guessed.

    python rules/stories/two_tasks.py         # ten seconds
"""

from pathlib import Path
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradsurgeon

STEPS, BATCH, WIDTH = 1500, 32, 16
TRAINED = 1350  # of 1797 images; the others are there to test with
RULES = Path(__file__).with_suffix(".yaml")


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        self.digit, self.ink = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 1)

    def forward(self, x):
        features = self.trunk(x)
        return self.digit(features), self.ink(features)[:, 0]


def load():
    """Return the images, which digits they show, and how much ink each took."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.as_tensor(digits.data, dtype=torch.float32)[order]
    ink = images.sum(1)
    images = (images - images[:TRAINED].mean()) / images[:TRAINED].std()
    return images, torch.as_tensor(digits.target)[order], ink


def train(mode):
    """Train; return the figures of the test images, and the session."""
    torch.manual_seed(0)
    images, digits, amounts = load()
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gradsurgeon.apply(model, RULES, optimizer=optimizer, mode=mode) as session:
        for _ in range(STEPS):
            chosen = torch.randint(0, TRAINED, (BATCH,))
            digit, ink = model(images[chosen])
            losses = {
                "digit": F.cross_entropy(digit, digits[chosen]),
                "ink": F.mse_loss(ink, amounts[chosen]),
            }
            optimizer.zero_grad()
            gradsurgeon.backward(losses)  # in the place of sum(losses.values()).backward()
            optimizer.step()
    return tested(model, images, digits, amounts), session


@torch.no_grad()
def tested(model, images, digits, amounts):
    """Return the share of digits that are read rightly, and of the variance of the ink that is explained."""
    digit, ink = model(images[TRAINED:])
    right = (digit.argmax(1) == digits[TRAINED:]).float().mean()
    amounts = amounts[TRAINED:]
    return right.item(), 1 - (F.mse_loss(ink, amounts) / amounts.var()).item()


def pair(session, stat):
    return [value for _, value in session.history("digit/ink", rule="tasks", stat=stat)]


def main():
    for mode in ("observe", "act"):
        (digits, ink), session = train(mode)
        cosine, ratio = (median(pair(session, stat)) for stat in ("cosine", "ratio"))
        print(f'mode="{mode}": {100 * digits:.1f}% of the digits, {100 * ink:.1f}% of the ink')
        print(f"  in the trunk: cosine {cosine:.2f}, digit {1 / ratio:,.0f} times smaller than ink")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
