"""Trains on digits with Lightning; the norms are in lightning_logs/version_*/metrics.csv, as the loss is."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from gradsurgeon.integrations import LightningCallback


class Reader(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))  # fmt: skip

    def training_step(self, batch, index):
        self.log("loss", loss := torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


digits = load_digits()
data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
rules = LightningCallback(Path(__file__).with_name("rules.yaml"))
trainer = pl.Trainer(max_epochs=3, logger=pl.loggers.CSVLogger("."), callbacks=[rules])
trainer.fit(Reader(), DataLoader(data, batch_size=18, shuffle=True))
