"""A tiny GPT-2 from its configuration, trained by Hugging Face's Trainer."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from weights import digest


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(7)
        self.rows = torch.randint(16, (24, 6), generator=draw)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


set_seed(7)
config = GPT2Config(
    vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=4,
        learning_rate=1e-2,
        logging_strategy="no",
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.remove_callback(PrinterCallback)  # prints times
    outcome = trainer.train()
    trainer.save_model()
    again = GPT2LMHeadModel.from_pretrained(folder)
print(f"steps {outcome.global_step} loss {outcome.training_loss:.9g}")
print("loaded again", digest(again) == digest(model))
print("weights", digest(model))
