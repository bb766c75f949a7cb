"""Send a run to TensorBoard, Weights & Biases and MLflow while it trains: python rules/integrations/train_with_trackers.py

It needs the packages: pip install "gradsurgeon[mlflow,tensorboard,wandb]" scikit-learn sqlalchemy alembic
"""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import gradsurgeon
from gradsurgeon import sinks

os.environ.setdefault("WANDB_MODE", "offline")
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.float() / 16
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
trackers = [
    sinks.TensorBoard("runs/tensorboard"),
    sinks.WandB("digits"),
    sinks.MLflow("sqlite:///runs/mlflow.db"),
]
with gradsurgeon.apply(model, Path(__file__).with_name("rules.yaml"), sinks=trackers) as session:
    for step in range(300):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
print(
    "to look at: tensorboard --logdir runs/tensorboard; mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"
)
