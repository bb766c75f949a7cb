"""accelerate: the model and the optimizer are prepared, gradients accumulate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from weights import digest

set_seed(9)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(torch.randn(30, 4), batch_size=3, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for index, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = (model(batch) - 1.0).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"batch {index} loss {loss.item():.9g}")
print("weights", digest(accelerator.unwrap_model(model)))
