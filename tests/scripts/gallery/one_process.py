"""Trainings in one process, without ranks."""

import copy
import threading
import warnings

import torch
from common import STEPS, loss_of, mlp, sow, tell, train, training
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


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
def plain_sgd():
    model = mlp()
    return train(model, SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True))


@training()
def adamw():
    model = mlp()
    return train(model)


@training()
def fused_adamw():
    model = mlp()
    return train(model, AdamW(model.parameters(), 1e-2, fused=True))


@training()
def foreach_adagrad():
    model = mlp()
    return train(model, Adagrad(model.parameters(), 1e-1, foreach=True))


@training()
def rmsprop():
    model = mlp()
    return train(model, RMSprop(model.parameters(), 1e-3, momentum=0.5))


@training()
def muon_and_adamw():
    model = mlp()
    muon = torch.optim.Muon([model[2].weight], 1e-3)
    rest = [p for p in model.parameters() if p is not model[2].weight]
    adamw = AdamW(rest, 1e-2)
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        tell(loss)
    return model


@training()
def lbfgs():
    model = mlp()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    x = torch.randn(16, 8)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        return loss

    for _ in range(8):
        tell(optimizer.step(closure))
    return model


@training()
def sgd_with_a_closure():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(STEPS):
        tell(optimizer.step(closure))
    return model


@training()
def accumulates():
    model = mlp()
    optimizer = AdamW(model.parameters(), 1e-2)
    for step in range(3 * STEPS):
        loss = loss_of(model) / 3
        loss.backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            tell(loss)
    return model


@training()
def zeroes_in_place():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        tell(loss)
    return model


@training()
def scaled_float16():
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        tell(loss)
    return model


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
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        return train(model)


@training()
def bfloat16_weights():
    model = mlp().bfloat16()

    def of(model):
        x = torch.randn(8, 8, dtype=torch.bfloat16)
        return (model(x) - x[:, :4]).square().mean()

    return train(model, SGD(model.parameters(), 0.3), of)


@training()
def float64_with_clipped_values():
    model = mlp().double()

    def of(model):
        x = torch.randn(8, 8, dtype=torch.float64)
        return (model(x) - x[:, :4]).square().mean()

    clip = lambda: clip_grad_value_(model.parameters(), 0.01)
    return train(model, SGD(model.parameters(), 0.3), of, before_update=clip)


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
def a_chain_of_checkpoints():
    model = mlp()

    def of(model):
        x = torch.randn(8, 8)
        return (checkpoint_sequential(model, 2, x, use_reentrant=False) - x[:, :4]).square().mean()

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

    train(model, SGD(model.parameters(), 0.05), of)
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

    train(model, SGD(model.parameters(), 0.05), of)
    print(len(unpacked), "tensors unpacked")
    return model


@training()
def compiled():
    model = mlp()
    return train(torch.compile(model, backend="aot_eager"), AdamW(model.parameters(), 1e-2))


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
def two_models_in_turn():
    generator, critic = mlp(), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    ours, theirs = Adam(generator.parameters(), 1e-2), Adam(critic.parameters(), 1e-2)
    for _ in range(STEPS):
        fake = generator(torch.randn(8, 8))
        theirs.zero_grad()
        loss = (
            functional.softplus(-critic(torch.randn(8, 4))).mean()
            + functional.softplus(critic(fake.detach())).mean()
        )
        loss.backward()
        theirs.step()
        ours.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        ours.step()
        tell(loss)
    return generator, critic


@training()
def several_optimizers_of_one_model():
    model = mlp()
    optimizers = [
        SGD(model[0].parameters(), 0.1),
        Adam(model[2].parameters(), 1e-2),
        RMSprop(model[4].parameters(), 1e-3),
    ]
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        tell(loss)
    return model


@training()
def a_frozen_backbone():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return train(model, AdamW([p for p in model.parameters() if p.requires_grad], 1e-2))


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
def tied_embeddings():
    table, body = nn.Embedding(12, 8), nn.Linear(8, 8)
    head = nn.Linear(8, 12, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, body, head)

    def of(model):
        words = torch.randint(12, (16,))
        return functional.cross_entropy(model(words), (words + 1) % 12)

    return train(model, loss_of=of)


@training()
def sparse_embeddings():
    table, head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4)
    optimizers = SparseAdam(table.parameters(), 1e-2), SGD(head.parameters(), 0.1)
    for _ in range(STEPS):
        words = torch.randint(50, (8, 3))
        loss = functional.cross_entropy(head(table(words)), words[:, 0] % 4)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tell(loss)
    return table, head


@training()
def updates_inside_backward():
    model = mlp()
    optimizers = {param: SGD([param], 0.1) for param in model.parameters()}

    def update(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        tell(loss)
    return model


@training()
def updates_by_hand():
    model = mlp()
    for _ in range(STEPS):
        loss = loss_of(model)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        tell(loss)
    return model


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

    return train(model, SGD(model.parameters(), 0.05), of)


@training()
def two_passes_through_one_graph():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(torch.randn(8, 8))
        out.square().mean().backward(retain_graph=True)
        loss = out.abs().mean()
        loss.backward()
        optimizer.step()
        tell(loss)
    return model


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
def evaluates_in_between_and_averages():
    model = Net()
    average = AveragedModel(model)
    optimizer = SGD(model.parameters(), 0.1)
    schedule = OneCycleLR(optimizer, 0.2, total_steps=STEPS)
    for step in range(STEPS):
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                tell(loss_of(model))
        tell(loss)
    return model, average


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
    train(model, SGD(model.parameters(), 0.1), steps=6)
    twin = copy.deepcopy(model)
    train(twin, SGD(twin.parameters(), 0.1))
    return model, twin


@training()
def lazy_layers():
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))
    return train(model, SGD(model.parameters(), 0.1))


@training()
def exchanged_by_a_conversion():
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    train(model, optimizer, steps=6)
    model.to(torch.float32).to("cpu")
    return train(model, optimizer)


@training()
def recurrent_layers():
    model = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1)

    def of(model):
        x = torch.randn(4, 6, 8)
        return (model(x)[0] - x).square().mean()

    return train(model, Adam(model.parameters(), 1e-2), of)


@training()
def a_transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def of(model):
        x = torch.randn(4, 6, 8)
        return (model(x) - x.roll(1, 1)).square().mean()

    return train(model, AdamW(model.parameters(), 1e-3), of)


@training()
def convolutions_with_parametrized_weights():
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3))
    bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(144, 4))
    model = nn.Sequential(normed, nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), bounded)

    def of(model):
        return functional.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.arange(8) % 4)

    return train(model, SGD(model.parameters(), 0.05), of)


@training()
def complex_weights():
    model = nn.Linear(8, 4, dtype=torch.complex64)

    def of(model):
        x = torch.randn(8, 8, dtype=torch.complex64)
        return (model(x) - x[:, :4]).abs().square().mean()

    return train(model, Adam(model.parameters(), 1e-2), of)


@training()
def gradients_of_each_sample():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    names = dict(model.named_parameters())

    def loss_of_one(params, x):
        return (torch.func.functional_call(model, params, (x,)) - x[:4]).square().mean()

    for _ in range(STEPS):
        params = {name: param.detach() for name, param in names.items()}
        grads = torch.func.vmap(torch.func.grad(loss_of_one), (None, 0))(params, torch.randn(8, 8))
        for name, param in names.items():
            param.grad = grads[name].clamp(-1, 1).mean(0)
        optimizer.step()
        tell(sum(param.grad.abs().sum() for param in names.values()))
    return model


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
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4))
    return train(model, SGD(model.parameters(), 0.1))


@training()
def anomaly_detection():
    model = mlp()
    with torch.autograd.detect_anomaly(check_nan=True):
        return train(model, SGD(model.parameters(), 0.1), steps=8)


@training()
def warnings_are_errors():
    warnings.simplefilter("error")
    model = mlp()
    return train(model, SGD(model.parameters(), 0.1))
