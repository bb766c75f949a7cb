"""Trains with the callback of each trainer on two ranks; each rank writes down what it saw."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from pathlib import Path
from typing import Any

from ranks import Json
from torch import nn
from trainers import test_callbacks as tests
from worker import work

from gradsurgeon.integrations import LightningCallback, TransformersCallback

# What the process group is for is known already, so each trainer takes the one that is there.
FOLDER = Path(sys.argv[1]).parent


def seen(callback: Any, model: nn.Module, logged: dict[Any, float], printed: str) -> Json:
    session = callback.session
    return {
        "history": [tests.total(session, step) for step in tests.steps_of(session)],
        "logged": list(logged.values()),
        "plans": printed.count("plan: "),
        "free": tests.is_free(model),
    }


def lightning() -> Json:
    printed = io.StringIO()
    logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(printed))
    callback, model = LightningCallback(tests.rules()), tests.Net()
    fit = tests.Fit(callback, FOLDER, devices=2, strategy="ddp", use_distributed_sampler=False)
    logged = fit.run(model).having(tests.TOTAL)
    return seen(callback, model, logged, printed.getvalue())


def transformers() -> Json:
    callback, model = TransformersCallback(tests.rules()), tests.Reader()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = tests.hugging(model, FOLDER, callback, ddp_backend="gloo")
        trainer.train()
    logged = tests.logged(trainer, tests.TOTAL)
    return seen(callback, model, logged, printed.getvalue())


work(lambda: {"lightning": lightning(), "transformers": transformers()})
