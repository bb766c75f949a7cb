"""What all scripts share: one line for the weights of a model, to the last bit."""

import hashlib

import torch


def digest(*models):
    found = hashlib.sha256()
    for model in models:
        for name, value in model.state_dict().items():
            found.update(name.encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]
