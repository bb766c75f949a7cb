"""A reinforcement loop: one optimizer over two models, several backward passes per step."""

import itertools

import torch
from torch import nn
from torch.distributions import Categorical
from weights import digest

torch.manual_seed(3)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.logits = nn.Linear(8, 2)

    def act(self, state):
        choice = Categorical(logits=self.logits(torch.tanh(self.body(state))))
        action = choice.sample()
        return action, choice.log_prob(action)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.value = nn.Linear(8, 1)

    def forward(self, state):
        return self.value(torch.tanh(self.body(state))).squeeze(-1)


actor, critic = Actor(), Critic()
optimizer = torch.optim.RMSprop(itertools.chain(actor.parameters(), critic.parameters()), lr=1e-2)

for update in range(5):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(3):
        state, rewards, log_probs, values = torch.randn(3), [], [], []
        for _ in range(4):
            # `act` is no `forward`: nothing calls the actor itself.
            action, log_prob = actor.act(state)
            rewards.append(float(state[0]) * (1.0 if action else -1.0))
            log_probs.append(log_prob)
            values.append(critic(state))
            state = 0.9 * state + 0.1 * torch.randn(3)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        estimates = torch.stack(values)
        advantage = (returns - estimates).detach()
        policy_loss = -(torch.stack(log_probs) * advantage).mean()
        policy_loss.backward()
        value_loss = (returns - estimates).square().mean()
        value_loss.backward()
        total += sum(rewards)
    optimizer.step()
    print(f"update {update} reward {total:.9g} value loss {value_loss.item():.9g}")

print("weights", digest(actor, critic))
