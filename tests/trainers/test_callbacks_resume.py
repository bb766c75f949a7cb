"""What rules have learnt is in the checkpoints of the trainers: a resumed training ends as an unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning
import pytest
import torch
from ranks import Json
from small import fields_of, rule_file, tanh_net
from torch import Tensor, nn
from trainers.own_warnings import OWN_WARNINGS
from transformers import Trainer, TrainingArguments

from gradsurgeon import GradSurgeonError, GradSurgeonWarning, runtime
from gradsurgeon.integrations import LightningCallback, TransformersCallback

pytestmark = [pytest.mark.slow, *OWN_WARNINGS]

RULES: Json = rule_file(
    {
        "id": "spikes",
        "action": "spike-trap",
        "params": "*",
        "above": {"sigmas": 1.5, "beta": 0.8, "warmup": 4},
    }
)
STEPS, BROKEN_OFF = 16, 9


def loss_of(net: nn.Module, step: int) -> Tensor:
    """Return a loss that is the same in a step whenever that is taken, and large in some."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (net(x) - x[:, :1]).square().mean() * (20.0 if step % 5 == 4 else 1.0)
    return loss


def net() -> nn.Module:
    torch.manual_seed(0)
    return tanh_net(4, 3, 1)


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


def fit(
    folder: Path, steps: int, callback: Any, checkpoint: str | None = None, **options: Any
) -> tuple[Net, Any]:
    model = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[] if callback is None else [callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        max_steps=steps,
        **options,
    )
    batches: Any = torch.utils.data.DataLoader(torch.zeros(2 * STEPS, 1), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, batches, ckpt_path=checkpoint)
    return model, trainer


def test_lightning(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, STEPS, LightningCallback(RULES))
    _, trainer = fit(tmp_path, BROKEN_OFF, LightningCallback(RULES))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = LightningCallback(RULES)
    resumed, _ = fit(tmp_path, STEPS, callback, str(tmp_path / "last.ckpt"))
    assert same(whole, resumed)
    session: Any = callback.session
    assert session.step == STEPS
    # It would be another one without what was learnt.
    (part,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert part["kept"][0].item() == STEPS
    assert session.status()["spikes"].changed > 0


def test_a_clip_of_lightning_that_makes_all_norms_alike_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(GradSurgeonWarning, match=r"to 0.5 before rule spikes .*gradient_clip_val"):
        fit(tmp_path, 2, LightningCallback(RULES), gradient_clip_val=0.5)


def test_a_checkpoint_of_lightning_without_the_callback_is_told_of(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, BROKEN_OFF, None)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = LightningCallback(RULES)
    with pytest.warns(GradSurgeonWarning) as told:
        fit(tmp_path, STEPS, callback, str(tmp_path / "last.ckpt"))
    assert [str(one.message) for one in told if one.category is GradSurgeonWarning] == [
        f"training resumes at step {BROKEN_OFF}, but the rules start without what they had learnt: the checkpoint was "
        "written without this callback"
    ]
    assert callback.session is not None
    assert callback.session.step == STEPS


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, step: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, int(step[0]))}


def train(
    folder: Path, callback: Any, steps: int, resume: Any = None, clip: float = 0.0, **options: Any
) -> Reader:
    """Train in a folder with the trainer of Hugging Face; return the model."""
    model = Reader()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        use_cpu=True,
        max_steps=steps,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=clip,
        save_strategy="steps",
        save_steps=BROKEN_OFF,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    rows = [{"step": step} for step in range(4 * STEPS)]
    callbacks = [] if callback is None else [callback]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=callbacks
    )
    # In order: what the steps take must not depend on when the training began.
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return model


def entered(callback: TransformersCallback) -> float:
    """Return how many updates have entered what the rule has learnt."""
    assert callback.session is not None
    (part,) = callback.session.state_dict()["rules"]["spikes"]["statistics"]
    return float(part["kept"][0])


def is_free(model: nn.Module) -> bool:
    return runtime.find(model) is None


@pytest.mark.usefixtures("own_environment")
class TestTransformers:
    @pytest.mark.parametrize(
        "where",
        ["the newest one", "same folder", "another folder", "renamed", "beside a foreign one"],
    )
    def test_it_goes_on_from_the_checkpoint_that_the_trainer_takes(
        self, where: str, tmp_path: Path
    ) -> None:
        whole = train(tmp_path / "whole", TransformersCallback(RULES), STEPS)
        train(tmp_path / "parts", TransformersCallback(RULES), BROKEN_OFF)
        checkpoint = tmp_path / "parts" / f"checkpoint-{BROKEN_OFF}"
        assert (checkpoint / "state-0.pt").is_file()
        folder, resume = tmp_path / "other", cast("Any", checkpoint)
        if where == "the newest one":
            folder, resume = tmp_path / "parts", True
        elif where == "same folder":
            folder = tmp_path / "parts"
        elif where == "renamed":
            resume = checkpoint.rename(tmp_path / "best")
        elif where == "beside a foreign one":
            foreign = {**RULES, "rules": [{**RULES["rules"][0], "params": "net.0.*"}]}
            train(folder, TransformersCallback(foreign), BROKEN_OFF)
        callback = TransformersCallback(RULES)
        resumed = train(folder, callback, STEPS, resume)
        assert same(whole, resumed)
        session: Any = callback.session
        assert session.step == STEPS
        assert entered(callback) == STEPS
        assert session.status()["spikes"].changed > 0

    @pytest.mark.parametrize("only_model", [False, True])
    def test_a_checkpoint_that_was_written_without_the_callback_is_told_of_once(
        self, only_model: bool, tmp_path: Path
    ) -> None:
        train(tmp_path, None, BROKEN_OFF, save_only_model=only_model)
        callback = TransformersCallback(RULES)
        with pytest.warns(GradSurgeonWarning) as told:
            train(tmp_path, callback, STEPS, True)
        (text,) = [str(one.message) for one in told if one.category is GradSurgeonWarning]
        assert text == (
            f"training resumes at step {BROKEN_OFF}, but the rules start without what they had learnt: there is no "
            f"{tmp_path}/checkpoint-{BROKEN_OFF}/state-0.pt; a training without this callback writes none"
        )
        assert callback.session is not None
        assert fields_of(callback.session, "message")[:1] == [text]
        assert callback.session.step == STEPS
        assert entered(callback) == STEPS - BROKEN_OFF

    def test_a_clip_of_the_trainer_that_makes_all_norms_alike_is_told_of(
        self, tmp_path: Path
    ) -> None:
        with pytest.warns(
            GradSurgeonWarning,
            match=r"norm of the gradients to 1 before rule spikes .*max_grad_norm=0",
        ):
            train(tmp_path, TransformersCallback(RULES), 2, clip=1.0)

    def test_a_trainer_that_does_not_tell_its_checkpoint_is_told_of(self, tmp_path: Path) -> None:
        model, callback = Reader(), TransformersCallback(RULES)
        trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True))
        trainer.state.global_step = 5
        with pytest.warns(GradSurgeonWarning) as told:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
        assert any("hides the checkpoint that it resumes from" in str(o.message) for o in told)
        callback.on_train_end(trainer.args, trainer.state, trainer.control, model=model)

    @pytest.mark.parametrize("damage", ["junk", "NaN"])
    def test_a_damaged_state_is_named_and_leaves_nothing_behind(
        self, damage: str, tmp_path: Path
    ) -> None:
        model = train(tmp_path, TransformersCallback(RULES), BROKEN_OFF)
        path = tmp_path / f"checkpoint-{BROKEN_OFF}" / "state-0.pt"
        if damage == "NaN":
            state = torch.load(path, weights_only=True)
            state["rules"]["spikes"]["statistics"][0]["kept"][1] = torch.nan
            torch.save(state, path)
        else:
            path.write_bytes(path.read_bytes()[:-100])
        callback = TransformersCallback(RULES)
        with pytest.raises(GradSurgeonError) as raised:
            train(tmp_path, callback, STEPS, True)
        assert str(raised.value).startswith(f"{path}: ")
        assert "the rules restart what they learn" in str(raised.value)
        assert is_free(model)
        session: Any = callback.session
        assert session._attachment.removed

    def test_a_state_that_cannot_be_written_stops_no_training(self, tmp_path: Path) -> None:
        path = tmp_path / f"checkpoint-{BROKEN_OFF}" / "state-0.pt"
        path.mkdir(parents=True)
        callback = TransformersCallback(RULES)
        with pytest.warns(GradSurgeonWarning, match="cannot save .*checkpoint-9: Is a directory"):
            train(tmp_path, callback, STEPS)
        assert entered(callback) == STEPS
        assert (tmp_path / f"checkpoint-{STEPS}" / "state-0.pt").is_file()

    def test_states_of_more_ranks_that_were_there_do_not_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / f"checkpoint-{BROKEN_OFF}"
        folder.mkdir()
        (folder / "state-1.pt").write_bytes(b"of another training")
        train(tmp_path, TransformersCallback(RULES), BROKEN_OFF)
        assert [path.name for path in folder.glob("state-*")] == ["state-0.pt"]

    def test_the_best_model_at_the_end_is_no_matter_of_the_rules(self, tmp_path: Path) -> None:
        callback = TransformersCallback(RULES)
        # The one metric that a model without labels has.
        best: Json = {
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_runtime",
        }
        evaluated: Json = {
            "eval_strategy": "steps",
            "eval_steps": BROKEN_OFF,
            "save_total_limit": 1,
        }
        model = train(tmp_path, callback, STEPS, **best, **evaluated)
        assert entered(callback) == STEPS
        assert is_free(model)
        session: Any = callback.session
        assert {event.kind for event in session.events} <= {"spike"}
