"""Attention in float16, whose mask makes a NaN as soon as a batch has a text without any character.

The mask once was -1e9, which PyTorch refuses in float16. So somebody wrote -inf. That is as good, but for rows of
the scores in which everything is masked: their softmax is 0 / 0. One of the 266 texts is empty, nothing but
padding, which no loss counts: the loss stays finite, and yet every gradient becomes NaN. The second run masks
with the lowest finite number of the format.

    python rules/stories/masked_softmax_float16.py  # ten seconds; writes masked_softmax_float16.html
"""

import math
import sys

import story
import torch
from torch import nn
from torch.nn import functional as F

import gradsurgeon

EPOCHS, BATCH, LENGTH, WIDTH = 8, 19, 40, 48
PADDING = 0


class Attention(nn.Module):
    def __init__(self, mended):
        super().__init__()
        self.masked = torch.finfo(torch.float16).min if mended else -math.inf
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, hidden):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(WIDTH)
        weights = torch.softmax(scores.masked_fill(hidden, self.masked), -1)
        return self.out(weights @ v)


class Writer(nn.Module):
    """Guesses each character from those before it, by one layer of attention."""

    def __init__(self, letters, mended):
        super().__init__()
        self.embed, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention(mended)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, x):
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = later | (x == PADDING)[:, None, :]
        x = self.embed(x) + self.places.weight
        return self.head(x + self.attention(x, hidden))


def texts():
    """Return each different line, the empty one too, as numbers padded to one length; and how many numbers there are."""
    lines = sorted({line.strip() for line in story.text().splitlines()})
    letters = sorted(set("".join(lines)))
    rows = [[letters.index(letter) + 1 for letter in line[: LENGTH + 1]] for line in lines]
    return torch.tensor([row + [PADDING] * (LENGTH + 1 - len(row)) for row in rows]), len(
        letters
    ) + 1


def train(mended, record):
    """Train, and return the losses and the traps, if any."""
    story.repeatable()
    data, letters = texts()
    model = Writer(letters, mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    with gradsurgeon.apply(
        model, story.HERE / "masked_softmax_float16.yaml", record=record
    ) as session:
        for _ in range(EPOCHS):
            for chosen in torch.split(torch.randperm(len(data)), BATCH):
                x, y = data[chosen, :-1], data[chosen, 1:]
                with torch.autocast("cpu", dtype=torch.float16):
                    guessed = model(x)
                loss = F.cross_entropy(
                    guessed.flatten(0, 1).float(), y.flatten(), ignore_index=PADDING
                )
                loss = gradsurgeon.tag(loss, "loss")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, [event for event in session.events if event.kind == "trap"]


def main():
    folder, html = story.files("masked_softmax_float16")
    infinity, lowest = folder / "infinity", folder / "lowest-number"
    (losses, traps), (mended, no_traps) = train(False, infinity), train(True, lowest)
    steps = [trap.step for trap in traps]
    found = traps[0].message.splitlines() if traps else []
    told = [line.strip() for line in found if line.startswith(("diagnosis", "  at ", "  cause"))]
    print(
        f"run 1, masked with -inf: in {EPOCHS} epochs of {len(losses) // EPOCHS} steps the trap skips {len(steps)}: {steps}"
    )
    finite = sum(map(math.isfinite, losses))
    print(
        f"  {finite} of {len(losses)} losses are finite, from {losses[0]:.2f} at the beginning to {losses[-1]:.2f} at the end"
    )
    print("\n".join(f"  {line}" for line in told))
    print(
        f"run 2, masked with {torch.finfo(torch.float16).min:.0f}: {len(no_traps)} traps, and the loss ends at {mended[-1]:.2f}"
    )
    came_out = len(steps) == EPOCHS and any("_softmax" in line for line in told) and not no_traps
    learnt = max(losses[-1], mended[-1]) < losses[0] - 1 and all(map(math.isfinite, losses))
    return story.end(came_out and learnt, [infinity, lowest], html)


if __name__ == "__main__":
    sys.exit(main())
