"""Trainings in one process, without ranks."""

import copy
import threading

import torch
from common import STEPS, loss_of, mlp, tell, train, train_by_sgd, training
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """A small network with all that evaluation and random numbers change."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


@training()
def adamw():
    return train(mlp())


@training()
def fused_adamw():
    model = mlp()
    return train(model, AdamW(model.parameters(), 1e-2, fused=True))


@training()
def scaled_without_unscaling():
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    optimizer = Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model)
        scaler.scale(loss / 2).backward()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model)
        scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tell(loss)
    return model


@training()
def autocast_to_bfloat16():
    def of(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    return train(mlp(), loss_of=of)


@training()
def bfloat16_weights():
    model = mlp().bfloat16()

    def of(model):
        x = torch.randn(8, 8, dtype=torch.bfloat16)
        return (model(x) - x[:, :4]).square().mean()

    return train_by_sgd(model, 0.3, loss_of=of)


@training()
def checkpoints():
    model = Net()

    def of(model):
        x = torch.randn(8, 8)
        hidden = checkpoint(
            lambda x: model.drop(torch.tanh(model.norm(model.first(x)))), x, use_reentrant=False
        )
        return (model.last(hidden) - x[:, :4]).square().mean()

    return train(model, loss_of=of)


@training()
def reentrant_checkpoints():
    model = Net()

    def of(model):
        x = torch.randn(8, 8).requires_grad_()
        return (checkpoint(model, x, use_reentrant=True) - x[:, :4]).square().mean()

    return train(model, loss_of=of)


@training()
def a_checkpointed_loss():
    model = mlp()
    drop = nn.Dropout(0.3)
    calls = []

    def criterion(out, y):
        calls.append(out.shape)
        return functional.mse_loss(drop(out.exp()), y)

    def of(model):
        x = torch.randn(8, 8)
        return checkpoint(criterion, model(x), x[:, :4], use_reentrant=False)

    train_by_sgd(model, 0.05, loss_of=of)
    print(len(calls), "calls of the loss")
    return model


@training()
def hooks_on_saved_tensors():
    model, unpacked = mlp(), []

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    def of(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return loss_of(model)

    train_by_sgd(model, 0.05, loss_of=of)
    print(len(unpacked), "tensors unpacked")
    return model


@training()
def compiled_in_place():
    model = Net()
    model.compile(backend="eager")
    return train(model)


@training()
def compiled_update():
    model = mlp()
    optimizer = Adam(model.parameters(), torch.tensor(1e-2))
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return train(model, optimizer, steps=6)


@training()
def thaws_later():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = AdamW(model[2:].parameters(), 1e-2)
    train(model, optimizer, steps=STEPS // 2)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    return train(model, optimizer)


@training()
def assigned_gradients():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    params = list(model.parameters())
    for _ in range(STEPS):
        loss = loss_of(model)
        for param, grad in zip(params, torch.autograd.grad(loss, params)):
            param.grad = grad
        optimizer.step()
        tell(loss)
    return model


@training()
def a_gradient_penalty():
    model = mlp()

    def of(model):
        x = torch.randn(8, 8, requires_grad=True)
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    return train_by_sgd(model, 0.05, loss_of=of)


@training()
def a_pass_for_some_inputs():
    model = mlp()
    head = list(model[4].parameters())
    optimizer = SGD(head, 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward(inputs=head)
        optimizer.step()
        tell(loss)
    return model


@training()
def warms_up_from_zero():
    model = mlp()
    optimizer = AdamW(model.parameters(), 1e-2)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 12))
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        schedule.step()
        tell(loss)
    return model


@training()
def starts_again_from_a_checkpoint():
    model = Net()
    optimizer = AdamW(model.parameters(), 1e-2)
    train(model, optimizer, steps=8)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, steps=4)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return train(model, optimizer, steps=STEPS)


@training()
def a_copy_trains_on():
    model = mlp()
    train_by_sgd(model, steps=6)
    twin = copy.deepcopy(model)
    train(twin, SGD(twin.parameters(), 0.1))
    return model, twin


@training()
def lazy_layers():
    return train_by_sgd(nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4)))


@training()
def exchanged_by_a_conversion():
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    train(model, optimizer, steps=6)
    model.to(torch.float32).to("cpu")
    return train(model, optimizer)


@training()
def convolutions_with_parametrized_weights():
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3))
    bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(144, 4))
    model = nn.Sequential(normed, nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), bounded)

    def of(model):
        return functional.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.arange(8) % 4)

    return train_by_sgd(model, 0.05, loss_of=of)


@training()
def complex_weights():
    model = nn.Linear(8, 4, dtype=torch.complex64)

    def of(model):
        x = torch.randn(8, 8, dtype=torch.complex64)
        return (model(x) - x[:, :4]).abs().square().mean()

    return train(model, Adam(model.parameters(), 1e-2), of)


@training()
def two_threads_train():
    models = mlp(), mlp(24)

    def work(model):
        draw = torch.Generator().manual_seed(1)
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(8, 8, generator=draw)
            (model(x) - x[:, :4]).square().mean().backward()
            optimizer.step()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return models


@training()
def a_scripted_part():
    return train_by_sgd(
        nn.Sequential(torch.jit.script(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4))
    )


@training()
def anomaly_detection():
    model = mlp()
    with torch.autograd.detect_anomaly(check_nan=True):
        return train_by_sgd(model, steps=8)
