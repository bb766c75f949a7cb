"""P3: the chain that the plan prints for a tensor is the one that ran, hook by hook or in a batch.

The rules write down themselves: each multiplies by 10 and adds its number, by an action of the test's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import pytest
import torch
from actions_of_users import forgotten_afterwards
from drawn_trainings import PATTERNS, Net
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import matched
from ranks import Json
from small import attach, sgd
from torch import Tensor

from gradsurgeon.actions import Edit, EditRule, Example


@pytest.fixture(scope="module", autouse=True)
def _append_digit() -> Iterator[None]:
    with forgotten_afterwards():

        class AppendDigit(EditRule):
            """Append a digit to every element.

            ## What it does
            Multiplies by 10 and adds `digit`.

            ## Why use it
            To see which rules have acted, and in which order.
            """

            EXAMPLES: ClassVar = (
                Example({"digit": 3, "at": "step"}, [1.0, 2.0], expect=[13.0, 23.0]),
            )

            action: Literal["append-digit"] = "append-digit"
            digit: int

            @property
            def keeps_zero(self) -> bool:
                return False

            def compile(self) -> Edit:
                def apply_(grads: Sequence[Tensor]) -> None:
                    for grad in grads:
                        grad.mul_(10).add_(self.digit)

                return Edit(
                    apply=lambda grad: grad * 10 + self.digit,
                    apply_=apply_,
                )

        yield


DRAWN = st.lists(
    st.fixed_dictionaries(
        {"params": st.sampled_from(PATTERNS), "at": st.sampled_from(["backward", "step"])},
        optional={"exclude": st.sampled_from(PATTERNS[1:])},
    ),
    min_size=2,
    max_size=9,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=examples(600))
@given(given_rules=DRAWN, hook=st.booleans(), held=st.booleans())
def test_the_chain_of_the_plan_is_what_ran(given_rules: list[Json], hook: bool, held: bool) -> None:
    rules = [
        {"id": f"r{n}", "action": "append-digit", "digit": n, "optional": True, **rule}
        for n, rule in enumerate(given_rules, 1)
    ]
    model = Net().double()
    optimizer = sgd(model, 0.0)
    if held:  # then gradients are there when the pass begins, and no rule waits for its end
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    with attach(model, *rules, optimizer=optimizer, replace=True) as session:
        if hook:  # then rules act one gradient at a time
            model.gain.register_hook(lambda grad: grad)
        torch.stack([(param * 0.0).sum() for param in model.parameters()]).sum().backward()
        optimizer.step()
        ran = {
            name: tuple(f"r{digit}" for digit in str(int(param.grad.max())) if digit != "0")
            for name, param in model.named_parameters()
            if param.grad is not None and param.grad.min() == param.grad.max()
        }
    assert len(ran) == len(list(model.parameters()))
    assert ran == {name: session.plan.chains.get(name, ()) for name in ran}
    for rule in rules:
        assert [name for name in ran if rule["id"] in ran[name]] == matched(rule, model)
