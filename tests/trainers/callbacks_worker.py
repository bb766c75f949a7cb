"""Trains with the callback of one trainer on two ranks; each rank writes down what it saw."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from trainers import test_callbacks as tests

from gradsurgeon.integrations import LightningCallback, TransformersCallback

torch.set_num_threads(1)
out = Path(sys.argv[1])
model: Any
callback: Any
printed = io.StringIO()
if out.name == "lightning":
    logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(printed))
    callback, model = LightningCallback(tests.rules()), tests.Net()
    fit = tests.Fit(callback, out.parent, devices=2, strategy="ddp", use_distributed_sampler=False)
    logged = list(fit.run(model).having(tests.TOTAL).values())
else:
    callback, model = TransformersCallback(tests.rules()), tests.Reader()
    with contextlib.redirect_stdout(printed):
        trainer = tests.hugging(model, out.parent, callback, ddp_backend="gloo")
        trainer.train()
    logged = list(tests.logged(trainer, tests.TOTAL).values())
session = callback.session
found = {
    "history": [tests.total(session, step) for step in tests.steps_of(session)],
    "logged": logged,
    "plans": printed.getvalue().count("plan: "),
    "free": tests.is_free(model),
}
Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")
torch.distributed.destroy_process_group()
os._exit(0)
