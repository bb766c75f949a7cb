"""Hugging Face's `Trainer`: rules act once per update, on the gradient that its optimizer consumes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import singly
from small import rule_file, sgd, steps_of
from torch import Tensor, nn
from trainers import by_hand
from trainers.by_hand import CLIP, PARTS, RULES, STEPS, Hand

import gradsurgeon

# They set variables of the environment, and keep a state for the process.
pytestmark = pytest.mark.usefixtures("own_environment")

LR = 0.5
FIRST = torch.tensor([0])
PART = "transformer.h.*"
TABLE = by_hand.table(PART, "transformer.h.0")
LOGGED = "transformer.wte.weight"


def make() -> Any:
    # Late: of many workers that import this file one runs its tests.
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **ends, loss_type="ForCausalLM"))


def texts() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(16, (6,), generator=draw) for _ in range(2 * PARTS * STEPS)]
    # Nothing predicts the first token; left in, releases differ in whether they count it.
    return [{"input_ids": row, "labels": row.index_fill(0, FIRST, -100)} for row in rows]


def trainer(model: nn.Module, path: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=PARTS,
        max_grad_norm=CLIP,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **{"optim": "sgd", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=texts())


def losses() -> Sequence[Sequence[by_hand.Micro]]:
    """The losses as the trainer makes them: sums over tokens, divided by the tokens of a step."""

    def loss(ids: Tensor, tokens: int, model: nn.Module) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss
        return found

    rows = torch.stack([text["input_ids"] for text in texts()]).view(STEPS, PARTS, 2, 6)
    tokens = PARTS * 2 * (6 - 1)
    return [[partial(loss, ids, tokens) for ids in step] for step in rows]


def hand_written(hand: Hand, **options: Any) -> by_hand.End:
    model = make()
    optimizer = sgd(model, LR)
    return by_hand.train(model, optimizer, losses(), hand, **options)


COMPARED = by_hand.Compared(TABLE, LOGGED, "transformer.h.0.mlp", hand_written)


@pytest.mark.cell("Hugging Face `Trainer`", "backward", "accumulated", "step", "modules")
@pytest.mark.parametrize("name", RULES)
def test_a_rule_ends_with_the_weights_of_the_loop_by_hand(name: str, tmp_path: Path) -> None:
    model = make()
    COMPARED.check_rule(name, model, lambda: trainer(model, tmp_path).train())


@singly(micro=[0, 1], then=["skip-step", "raise"])
def test_a_nan_is_stopped_and_named_before_clipping_smears_it(
    then: str, micro: int, tmp_path: Path
) -> None:
    model = make()
    first = COMPARED.check_nan(then, micro, model, lambda: trainer(model, tmp_path).train())
    assert first.startswith("transformer.h.0.mlp.c_proj.")


def watching(model: nn.Module) -> Any:
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Sees the gradients between the clipping of the trainer and the update."""

        def __init__(self) -> None:
            self.clipped: list[float] = []

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            weight = model.get_parameter(LOGGED)
            assert weight.grad is not None
            self.clipped.append(weight.grad.norm().item())

    return Watching()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_bf16_and_the_default_optimizers(optim: str, tmp_path: Path) -> None:
    rules = rule_file(
        {"id": "clipped", "action": "norm-log", "at": "step", "params": LOGGED},
        {"id": "half", "action": "scale", "factor": 0.5, "at": "step", "params": "*"},
        {"id": "halved", "action": "norm-log", "at": "step", "params": LOGGED},
        {"id": "trap", "action": "nan-trap", "params": "*"},
    )
    model = make()
    seen = watching(model)
    with gradsurgeon.apply(model, rules) as session:
        made = trainer(model, tmp_path, optim=optim, bf16=True)
        made.add_callback(seen)
        made.train()
        # The wrapper of accelerate and what it wraps are one optimizer, with one clock.
        assert session.step == STEPS
    (notice,) = session.events
    assert (notice.kind, notice.rule) == ("notice", "half")
    assert "AdamW divides each gradient by its running size" in notice.message
    assert steps_of(session, LOGGED, rule="clipped") == list(range(STEPS))
    clipped = [norm for _, norm in session.history(LOGGED, rule="clipped")]
    halved = [norm for _, norm in session.history(LOGGED, rule="halved")]
    assert clipped == pytest.approx(seen.clipped, rel=1e-5)
    assert halved == pytest.approx([norm / 2 for norm in seen.clipped], rel=1e-5)
    assert session.status()["half"].fired == STEPS * len(list(model.parameters()))


def test_tied_weights_have_the_name_of_the_embedding() -> None:
    plan = gradsurgeon.plan(make(), TABLE["no rule"].rules())
    names = {binding.name: binding.aliases for binding in plan.of("norms")}
    assert names[LOGGED] == ("lm_head.weight",)
