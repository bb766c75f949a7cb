"""A progress bar on standard error, or on the stream that is named, its own warnings and log lines beside it."""

import logging
import sys
import warnings

import torch
from torch import nn
from tqdm import tqdm
from weights import digest

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
log = logging.getLogger("train")
torch.manual_seed(18)
model = nn.Sequential(nn.Linear(3, 4), nn.SELU(), nn.Linear(4, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
log.info("parameters %d", sum(param.numel() for param in model.parameters()))
stream = getattr(sys, sys.argv[1]) if sys.argv[1:] else None
# Times would differ from run to run.
form = "{desc} {n_fmt}/{total_fmt} |{bar:10}|"
bar = tqdm(range(5), mininterval=0, bar_format=form, file=stream)
for step in bar:
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    bar.set_description(f"loss {loss.item():.6g}")
    print(f"step {step} loss {loss.item():.9g}")
warnings.warn("the learning rate was never changed", stacklevel=1)
log.warning("done")
print("weights", digest(model))
