"""Ranks that do not do the same with their losses: none waits for ever, and each gets what it should."""

from __future__ import annotations

import pytest
from distributed.unlike_losses_worker import BETWEEN, MET, WRAPPED
from ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.cover_children]


def test_micro_batches_that_are_not_averaged_may_differ_in_number(
    ranks: Ranks,
) -> None:
    assert max(rank["uneven"] for rank in ranks) < 1e-12


@pytest.mark.parametrize("kind", ["plain", "named"])
def test_a_pass_of_the_wrapped_model_is_one_of_this_rank_alone(ranks: Ranks, kind: str) -> None:
    first, second = (rank["pass of one rank"][kind] for rank in ranks)
    assert max(first["off"], second["off"]) < 1e-12
    assert second["said"] == []
    told = ["without the losses being known"] if kind == "plain" else []
    assert [text in message for text, message in zip(told, first["said"], strict=True)] == [
        True
    ] * len(told)


@pytest.mark.parametrize("when", WRAPPED)
def test_a_wrapper_is_known_whenever_it_is_made(ranks: Ranks, when: str) -> None:
    assert max(rank["wrapped"][when] for rank in ranks) < 1e-12


@pytest.mark.parametrize("what", BETWEEN)
def test_the_pass_that_is_averaged_is_known_whatever_comes_between(ranks: Ranks, what: str) -> None:
    assert max(rank["between"][what] for rank in ranks) < 1e-12


@pytest.mark.parametrize("how", ["other widths", "ignored"])
def test_what_ddp_leaves_alone_has_no_part_in_the_weights(ranks: Ranks, how: str) -> None:
    assert max(rank["own"][how] for rank in ranks) < 1e-12


@pytest.mark.parametrize("kind", MET)
def test_passes_that_meet_other_ranks_are_as_many_on_all(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        found, wanted = rank["met"][kind]
        assert found["weight"] == pytest.approx(wanted["weight"], rel=1e-6)
        assert found["grads"] == pytest.approx(wanted["grads"], rel=1e-9, abs=1e-12)
    assert ranks[0]["met"][kind][0]["grads"] == ranks[1]["met"][kind][0]["grads"]
