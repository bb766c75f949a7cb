"""Two models, two optimizers, the same names in both; the critic steps twice as often."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from weights import digest

torch.manual_seed(2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 6))

    def forward(self, z):
        return torch.tanh(self.net(z))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def forward(self, x):
        return self.net(x)


generator = Generator()
discriminator = Discriminator()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
real = torch.rand(16, 6) * 2 - 1
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)

for step in range(4):
    for _ in range(2):
        discriminator.zero_grad()
        loss_real = bce(discriminator(real), ones)
        loss_real.backward()
        fake = generator(torch.randn(16, 4)).detach()
        loss_fake = bce(discriminator(fake), zeros)
        loss_fake.backward()
        optimizer_d.step()
    generator.zero_grad()
    loss_g = bce(discriminator(generator(torch.randn(16, 4))), ones)
    loss_g.backward()
    optimizer_g.step()
    print(f"{step} d {(loss_real + loss_fake).item():.9g} g {loss_g.item():.9g}")

print("weights", digest(generator, discriminator))
