"""Trains on digits with the Trainer of Hugging Face; the norms are printed beside the loss."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments

from gradsurgeon.integrations import TransformersCallback


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, image, labels):
        return {"loss": nn.functional.cross_entropy(self.net(image), labels)}


digits = load_digits()
images = torch.tensor(digits.data).float() / 16
data = [{"image": image, "labels": label} for image, label in zip(images, digits.target.tolist())]
args = TrainingArguments("out", num_train_epochs=3, learning_rate=1e-2, per_device_train_batch_size=64, logging_steps=10, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)  # fmt: skip
rules = TransformersCallback(Path(__file__).with_name("rules.yaml"))
Trainer(Reader(), args, train_dataset=data, callbacks=[rules]).train()
