"""Trains on digits with accelerate; needs no callback: the loop is yours, and so is the call of `apply`."""

from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsurgeon

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.Adam(model.parameters(), lr=1e-2), DataLoader(data, 64, shuffle=True)
)
session = gradsurgeon.apply(model, Path(__file__).with_name("rules.yaml"), optimizer=optimizer)
for image, label in [batch for epoch in range(3) for batch in loader]:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(image), label))
    optimizer.step()
session.remove()
if accelerator.is_main_process:
    print(gradsurgeon.report.summary(session))
