"""Which tensors can be read where no rule has matched them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import linears, messages, sgd
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradsurgeon
from gradsurgeon.forensics.operations import facts, nonfinite_kind
from gradsurgeon.tensors.readable import readable

dist: Any = torch.distributed


class Tagged(Tensor):
    """A subclass of a script, with numbers of its own."""


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4),
        torch.ones(4)[1:],
        torch.ones(1).expand(4),
        torch.empty(0),
        nn.Parameter(torch.ones(4)),
        torch.ones(4).as_subclass(Tagged),
        torch.ones(2, 2).to_sparse(),
    ],
    ids=["whole", "part", "expanded", "empty", "parameter", "subclass", "sparse"],
)
def test_numbers_that_are_here_are_read(tensor: Tensor) -> None:
    found = readable(tensor)
    assert found is not None
    assert not found.requires_grad
    assert torch.equal(found.to_dense(), tensor.detach().to_dense())


@pytest.mark.parametrize(
    "make", [freed, fake, lambda: torch.ones(4, device="meta")], ids=["freed", "fake", "meta"]
)
def test_there_is_nothing_to_read(make: Any) -> None:
    assert readable(make()) is None


def test_a_diagnosis_sees_no_number_where_the_storage_is_gone() -> None:
    assert nonfinite_kind(freed()) == ""
    assert facts(freed()).numel == 0


def test_nothing_is_read_in_a_transform() -> None:
    seen: list[object] = []

    def function(x: Tensor) -> Tensor:
        seen.append(readable(x))
        return x.sum()

    torch.func.grad(function)(torch.ones(4))
    torch.func.vmap(function)(torch.ones(4, 2))
    assert seen == [None, None]


def test_of_a_distributed_tensor_the_part_of_this_rank_is_read(mesh: Any) -> None:
    part = torch.ones(4)
    assert readable(DTensor.from_local(part, mesh, [Shard(0)])) is not None
    # What a collective will write is not there yet.
    assert readable(AsyncCollectiveTensor(part)) is None
    assert readable(DTensor.from_local(AsyncCollectiveTensor(part), mesh, [Shard(0)])) is None


@pytest.mark.parametrize("partial", [True, False])
def test_the_default_pack_takes_a_loss_that_is_distributed(mesh: Any, *, partial: bool) -> None:
    model = linears(4, 4, 2)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, plan)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, "gradsurgeon:debug@1", optimizer=optimizer) as session:
        for _ in range(3):
            loss: Any = model(torch.ones(2, 4)).square().mean()
            if partial:
                loss = DTensor.from_local(loss.to_local(), mesh, [Partial()])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.step == 3
    assert messages(session, "check") == []
