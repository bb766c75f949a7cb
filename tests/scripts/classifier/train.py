"""Run as `python -m classifier.train`: a package with relative imports and a scheduler."""

import sys

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from weights import digest

from .data import loader
from .model import Classifier


def main(epochs):
    torch.manual_seed(1)
    model = Classifier(width=6)
    batches = loader(batch=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad(set_to_none=False)
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        print(f"epoch {epoch} loss {total:.9g} lr {schedule.get_last_lr()[0]:.6g}")
    print("package", __package__, "spec", __spec__.name, "argv", sys.argv[1:])
    print("weights", digest(model))


if __name__ == "__main__":
    main(int(sys.argv[1]))
