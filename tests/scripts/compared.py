"""A small transformer, trained in one of several ways that should agree: `compared.py WAY CHECKPOINT`."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

way, checkpoint = sys.argv[1:]
STEPS, BATCH, WORDS, WIDTH = 6, 16, 50, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if way.endswith("refactored"):
            q, k, v = parts
            scores = q @ k.transpose(-1, -2) / 8**0.5
            mask = torch.ones(scores.shape[-2:]).triu(1).bool()
            mixed = scores.masked_fill(mask, -torch.inf).softmax(-1).to(v.dtype) @ v
        else:
            mixed = scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


torch.set_num_threads(1)
torch.manual_seed(0)
parts = [Residual(part) for part in (Attention(), mlp(), Attention(), mlp())]
model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *parts, nn.Linear(WIDTH, WORDS))
rank, ranks = 0, 1
if way in ("ddp", "fsdp2"):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
forward = model
if way == "ddp":
    forward = DistributedDataParallel(model)
elif way == "fsdp2":
    for part in (*parts, model):
        fully_shard(part)
elif way == "compiled":
    forward = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if way == "resumed":
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
pieces = 2 if way == "accumulated" else 1
autocast = torch.autocast("cpu", torch.bfloat16) if way.startswith("bf16") else nullcontext()
for step in range(first, STEPS):
    if way == "saved" and step == STEPS // 2:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint)
    words = torch.randint(0, WORDS, (BATCH, 12), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    for piece in words.chunk(ranks)[rank].chunk(pieces):
        with autocast:
            logits = forward(piece[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten()) / pieces
        loss.backward()
    optimizer.step()
if ranks > 1:
    dist.destroy_process_group()
