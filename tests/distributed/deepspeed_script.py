"""A training under an engine of DeepSpeed in ZeRO 2, on one rank or several."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(4):
    loss = engine(torch.randn(4, 8).bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
# A thread of gloo may abort the process while Python ends.
torch.distributed.destroy_process_group()
