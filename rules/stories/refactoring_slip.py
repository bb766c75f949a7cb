"""A refactoring gives one head of one block a wrong scale; the losses look alike, and `compare` names the block.

The last head of block 1 is half as wide as the others. The old attention divides the scores of each head by the
root of its width. The new one scales all queries at once, by the width of the first head.

    python rules/stories/refactoring_slip.py        # half a minute
    python rules/stories/refactoring_slip.py old    # four steps with the old attention; `new`: with the new one
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import story
import torch
from torch import nn
from torch.nn import functional as F

import gradsurgeon

STEPS, RECORDED = 50, 4
BATCH, LENGTH, WIDTH = 16, 32, 48
HEADS = [
    (12, 12, 12, 12),
    (12, 12, 12, 6),
    (12, 12, 12, 12),
]  # the widths of the heads of each block
RUN = [sys.executable, "-m", "gradsurgeon", "run", "--quiet"]
RUN += ["--rules", "gradsurgeon:fingerprint@1"]


class OldAttention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, sum(heads)) for _ in range(3))
        self.out = nn.Linear(sum(heads), WIDTH)

    def forward(self, x):
        hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
        mixed = []
        for q, k, v in zip(*(one(x).split(self.heads, -1) for one in (self.q, self.k, self.v))):
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            mixed.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
        return self.out(torch.cat(mixed, -1))


class NewAttention(OldAttention):
    def forward(self, x):
        q = self.q(x) * self.heads[0] ** -0.5  # once, in the place of once for each head
        parts = (one.split(self.heads, -1) for one in (q, self.k(x), self.v(x)))
        mixed = [F.scaled_dot_product_attention(*p, is_causal=True, scale=1) for p in zip(*parts)]
        return self.out(torch.cat(mixed, -1))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Writer(nn.Module):
    def __init__(self, letters, attention):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention(heads)) for heads in HEADS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, x):
        return self.head(self.ln(self.blocks(self.letter(x) + self.place.weight)))


def train(attention, steps):
    """Train from the same weights on the same batches, and return the losses."""
    story.repeatable()
    text = story.text()
    letters = sorted(set(text))
    text = torch.tensor([letters.index(letter) for letter in text])
    model = Writer(len(letters), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        begin = torch.randint(0, len(text) - LENGTH, (BATCH, 1))
        batch = text[begin + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def record(name, attention, *options):
    command = [*RUN, "--record", name, *options, __file__, attention]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compared():
    """Do what the guide shows, in the current folder."""
    noise = ["noise0", "noise1", "noise2"]
    record("a", "old")
    for seed, name in enumerate(noise):
        record(name, "old", "--perturb", "1e-6", "--seed", str(seed))
    record("b", "new")
    return gradsurgeon.compare("b", "a", noise)


def tell(folder):
    with contextlib.chdir(folder):
        found = compared()
    print(found, end="\n\n")
    losses = {"old": train(OldAttention, STEPS), "new": train(NewAttention, STEPS)}
    apart = max(abs(one - other) for one, other in zip(*losses.values()))
    print(f"in {STEPS} steps the losses are never further apart than {apart:.4f}")
    return int(not (apart < 0.01 and found.step == 0 and found.inside == "blocks.1.attn"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("attention", nargs="?", choices=("old", "new"), help="train a few steps")
    parser.add_argument("--record", metavar="DIR", help="default: a new temporary folder")
    given = parser.parse_args()
    if given.attention:
        train(OldAttention if given.attention == "old" else NewAttention, RECORDED)
        return 0
    folder = given.record or tempfile.mkdtemp(prefix="refactoring-slip-")
    return tell(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
