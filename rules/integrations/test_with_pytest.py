"""A test of a training loop, under a trap:

pytest rules/integrations/test_with_pytest.py
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


@pytest.mark.gradsurgeon  # a NaN or an infinity in a gradient fails the test, with where it was born
def test_that_digits_are_learned(gradsurgeon_sessions):
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = cross_entropy(model(images.float() / 16), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    assert [session.step for session in gradsurgeon_sessions] == [60]
