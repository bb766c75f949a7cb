"""An LSTM that learns to write, character by character, with a learning rate borrowed without its clip.

PyTorch's own example of a language model trains with SGD at a learning rate of 20, and clips the norm of the
gradient at 0.25. This script took the 20 and left the clip out. The first run shows what comes of that, the
second one what the clip makes of it; the page shows both, one beside the other.

    python rules/stories/exploding_lstm.py        # ten seconds; writes exploding_lstm.html
"""

import math
import sys

import story
import torch
from torch import nn
from torch.nn import functional as F

import gradsurgeon

STEPS, BATCH, LENGTH = 200, 16, 50
LEARNING_RATE = 20.0


class Writer(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.embed = nn.Embedding(letters, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, letters)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


def train(mode, record):
    """Train, and return the losses."""
    story.repeatable()
    text = story.text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = Writer(len(letters))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    with gradsurgeon.apply(model, story.HERE / "exploding_lstm.yaml", mode=mode, record=record):
        for _ in range(STEPS):
            starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,))
            x = torch.stack([data[start : start + LENGTH + 1] for start in starts])
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss = gradsurgeon.tag(loss, "loss")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def whole_norms(record):
    """Return the norm of the whole gradient at each step, and the name of the largest part of the largest."""
    names = [name for name, _ in Writer(2).named_parameters()]
    # By step: the norms of all parameters.
    rows = list(zip(*([value for _, value in story.recorded(record, name)] for name in names)))
    norms = [math.hypot(*row) for row in rows]
    worst = rows[norms.index(max(norms))]
    return norms, names[worst.index(max(worst))]


def main():
    folder, html = story.files("exploding_lstm")
    without, with_clip = folder / "without-clip", folder / "with-clip"
    losses, clipped = train("observe", without), train("act", with_clip)
    norms, name = whole_norms(without)
    calm, _ = whole_norms(with_clip)
    times = max(norms) / norms[0]
    print(
        f"run 1, without the clip: the loss begins at {losses[0]:.2f}, the norm of the gradient at {norms[0]:.2f}"
    )
    print(
        f"  at step {norms.index(max(norms))} the norm is {max(norms):.0f}, {times:.0f} times that; most of it is in {name}"
    )
    print(
        f"  the loss rises to {max(losses):.0f} at step {losses.index(max(losses))}, and ends at {losses[-1]:.2f}"
    )
    print("run 2, with the clip, and all else as it was:")
    print(f"  the norm is never above {max(calm):.2f}, and the loss ends at {clipped[-1]:.2f}")
    exploded = times > 50 and losses[-1] > losses[0] / 2
    mended = max(calm) < max(norms) / 20 and clipped[-1] < losses[0] / 2
    return story.end(exploded and mended, [without, with_clip], html)


if __name__ == "__main__":
    sys.exit(main())
