"""Lightning, automatic optimization: the trainer hands the optimizer a closure."""

import logging
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from weights import digest

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        print(f"batch {index} loss {loss.item():.9g}")
        return loss

    def validation_step(self, batch, index):
        print(f"check {index} loss {self.net(batch).square().mean().item():.9g}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


lightning.seed_everything(8, verbose=False)
model = Regression()
rows = torch.randn(24, 4)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(rows, batch_size=6), DataLoader(rows[:4], batch_size=4))
print("weights", digest(model))
