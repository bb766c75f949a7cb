"""What rules have learnt is in the checkpoints of the trainers: a resumed training ends as an unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from gradsurgeon.integrations import LightningCallback, TransformersCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable"),
]

RULES = {
    "version": 1,
    "rules": [
        {
            "id": "spikes",
            "action": "spike-trap",
            "params": "*",
            "above": {"sigmas": 1.5, "beta": 0.8, "warmup": 4},
        }
    ],
}
STEPS, BROKEN_OFF = 16, 9


def loss_of(net: nn.Module, step: int) -> Tensor:
    """Return a loss that is the same in a step whenever that is taken, and large in some."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (net(x) - x[:, :1]).square().mean() * (20.0 if step % 5 == 4 else 1.0)
    return loss


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, _batch: Tensor, _index: int) -> Tensor:
        return loss_of(self.net, self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def test_lightning(tmp_path: Path) -> None:
    def fit(steps: int, callback: Any, checkpoint: str | None = None) -> tuple[Net, Any]:
        model = Net()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            callbacks=[callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
            max_steps=steps,
        )
        batches: Any = torch.utils.data.DataLoader(torch.zeros(2 * STEPS, 1), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(model, batches, ckpt_path=checkpoint)
        return model, trainer

    whole, _ = fit(STEPS, LightningCallback(RULES))
    _, trainer = fit(BROKEN_OFF, LightningCallback(RULES))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = LightningCallback(RULES)
    resumed, _ = fit(STEPS, callback, str(tmp_path / "last.ckpt"))
    assert same(whole, resumed)
    session: Any = callback.session
    assert session.step == STEPS
    # It would be another one without what was learnt.
    (part,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert part["kept"][0].item() == STEPS
    assert session.status()["spikes"].changed > 0


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, step: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, int(step[0]))}


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("by", ["path", "the newest one"])
def test_transformers(by: str, tmp_path: Path) -> None:
    def train(
        folder: str, callback: Any, steps: int, resume: str | None = None
    ) -> Reader:  # as the trainer has it
        model = Reader()
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=1,
            use_cpu=True,
            max_steps=steps,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="steps",
            save_steps=BROKEN_OFF,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        rows = [{"step": step} for step in range(4 * STEPS)]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
        # In order: what the steps take must not depend on when the training began.
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        trainer.train(resume_from_checkpoint=True if resume == "newest" else resume)
        return model

    whole = train("whole", TransformersCallback(RULES), STEPS)
    train("parts", TransformersCallback(RULES), BROKEN_OFF)
    checkpoint = tmp_path / "parts" / f"checkpoint-{BROKEN_OFF}"
    assert (checkpoint / "state-0.pt").is_file()
    callback = TransformersCallback(RULES)
    resumed = train("parts", callback, STEPS, str(checkpoint) if by == "path" else "newest")
    assert same(whole, resumed)
    session: Any = callback.session
    assert session.step == STEPS
    (part,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert part["kept"][0].item() == STEPS
    assert session.status()["spikes"].changed > 0
