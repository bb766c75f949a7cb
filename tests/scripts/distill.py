"""Self-distillation: the teacher is a moving average of the student; the best state is kept."""

import copy
import io

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from weights import digest

torch.manual_seed(6)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.GRU(6, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens):
        hidden, _ = self.mix(self.embed(tokens))
        return self.out(hidden[:, -1])


student = Encoder()
teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
teacher.requires_grad_(False)
decayed = [param for param in student.parameters() if param.ndim > 1]
others = [param for param in student.parameters() if param.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-3)
best, best_loss = None, float("inf")

for step in range(6):
    tokens = torch.randint(11, (8, 5))
    with torch.no_grad():
        target = teacher(tokens).softmax(-1)
    noisy = tokens.where(torch.rand(8, 5) > 0.1, 0)
    loss = functional.kl_div(student(noisy).log_softmax(-1), target, reduction="batchmean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    teacher.update_parameters(student)
    if loss.item() < best_loss:
        best, best_loss = copy.deepcopy(student), loss.item()
    print(f"step {step} loss {loss.item():.9g}")

buffer = io.BytesIO()
torch.save(student, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
print("saved and loaded", digest(loaded) == digest(student), "hooks", len(loaded._forward_hooks))
print("best", digest(best), "size", buffer.getbuffer().nbytes // 1000)
print("weights", digest(student, teacher))
