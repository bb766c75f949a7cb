"""Models of Lightning for `test_lightning`, which imports it late: of many workers one runs those tests."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from small import sgd
from torch import Tensor, nn
from trainers.by_hand import CLIP, PARTS


class Net(lightning.LightningModule):
    """Five layers, trained by either of the two ways."""

    def __init__(self, loss: Any, *, manual: bool = False, kind: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)
        )
        self.automatic_optimization = not manual
        self._loss, self._kind = loss, kind

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        found: Tensor = self._loss(batch, self)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(found / PARTS)
            if index % PARTS == PARTS - 1:
                self.clip_gradients(
                    optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm"
                )
                optimizer.step()
                optimizer.zero_grad()
        return found

    def configure_optimizers(self) -> Any:
        return self._kind(self.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


class Gan(lightning.LightningModule):
    """Two optimizers; the second steps twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Linear(4, 4)
        self.d = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, index: int) -> None:
        generator, critic = self.optimizers()
        for own in [generator, critic] if index % 2 == 0 else [critic]:
            own.zero_grad()
            self.manual_backward(self.d(self.g(batch)).mean())
            own.step()

    def configure_optimizers(self) -> Any:
        return [sgd(part) for part in (self.g, self.d)]
