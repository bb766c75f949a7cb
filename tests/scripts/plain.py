"""The loop that everybody writes first."""

import argparse

import torch
from torch import nn
from weights import digest

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--rules", help="the option of a launcher, here one of the script")
args = parser.parse_args()

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
criterion = nn.CrossEntropyLoss()
data = torch.randn(24, 8)
labels = torch.randint(3, (24,))

for step in range(args.steps):
    optimizer.zero_grad()
    loss = criterion(model(data), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g} norm {norm:.9g}")

model.eval()
print("arguments", args.lr, args.steps, args.rules)
print("accuracy", (model(data).argmax(1) == labels).float().mean().item())
print("weights", digest(model))
