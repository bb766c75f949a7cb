"""No optimizer: weights are updated by hand. A frozen teacher runs first, a copy follows."""

import copy

import torch
from torch import nn
from weights import digest

torch.manual_seed(5)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))

    def forward(self, x):
        return self.layers(x)


class Matching(nn.Module):
    def __init__(self):
        super().__init__()
        self.distance = nn.MSELoss()

    def forward(self, found, wanted):
        return self.distance(found, wanted)


teacher = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3)).eval()
for param in teacher.parameters():
    param.requires_grad_(False)
student = Student()
average = copy.deepcopy(student).eval()
criterion = Matching()
x = torch.randn(32, 5)

for step in range(6):
    wanted = teacher(x)
    loss = criterion(student(x), wanted)
    student.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in student.parameters():
            param -= 0.1 * param.grad
        for slow, fast in zip(average.parameters(), student.parameters()):
            slow.lerp_(fast, 0.1)
    with torch.no_grad():
        gap = criterion(average(x), wanted)
    print(f"step {step} loss {loss.item():.9g} average {gap.item():.9g}")

print("weights", digest(student, average))
