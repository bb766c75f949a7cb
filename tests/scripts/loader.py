"""A worker loads the data, forked or spawned."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from weights import digest


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return torch.tensor([index / 16.0, 1.0]), torch.tensor([(index / 16.0) ** 2])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", choices=["fork", "spawn"], required=True)
    args = parser.parse_args()
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Squares(),
        batch_size=4,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=args.start,
        persistent_workers=True,
    )
    for epoch in range(2):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item():.9g}")
    print("weights", digest(model))


if __name__ == "__main__":
    main()
