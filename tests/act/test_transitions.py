"""The table of a resize's states: what it allows, and that its picture is the one in the documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_ones.act.blocks import BLOCK_HANDLERS
from slurm_ones.act.resize import HANDLERS
from slurm_ones.act.transitions import EDGES, FINAL, TRANSITIONS, IllegalTransition, Stage, State, first_state, picture
from slurm_ones.rules.blocks import BLOCKS, REQUEUE
from tests.act.world import World

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_every_state_has_a_row_and_a_handler() -> None:
    """Protects from a state that a resize never leaves."""
    assert {stage.state for stage in TRANSITIONS} == set(State) - FINAL and all(edge.why for edge in EDGES)
    assert len({edge[1:4] for edge in EDGES}) == len(EDGES)
    for mechanism, handlers in ((REQUEUE, HANDLERS), (BLOCKS, BLOCK_HANDLERS)):
        assert handlers.keys() == {edge.before for edge in EDGES if edge.mechanism == mechanism}


def test_every_state_is_reached_and_leads_to_an_end() -> None:
    """Protects from a row that nothing leads to, and from a loop without a way out."""
    ends = {Stage(state) for state in FINAL}
    firsts = first_state(REQUEUE), first_state(REQUEUE, running=False), first_state(BLOCKS)
    reached = {*map(Stage, firsts)}
    while more := {after for stage in reached for after in TRANSITIONS.get(stage, ())} - reached:
        reached |= more
    assert reached == TRANSITIONS.keys() | ends
    ending = set(ends)
    while more := {stage for stage in TRANSITIONS if TRANSITIONS[stage] & ending} - ending:
        ending |= more
    assert ending == reached


def test_a_step_that_the_table_does_not_have_is_refused(make_world: Callable[..., World]) -> None:
    """Protects the database from a state that no companion could go on from."""
    world = make_world()
    world.begin()
    with pytest.raises(IllegalTransition, match="from draining to starting"):
        world.machine.move(world.resize, State.STARTING)
    assert world.states == ["draining"]


def test_the_picture_in_the_documents_is_that_of_the_table() -> None:
    """python -m slurm_ones.act.transitions prints what belongs between the markers."""
    shown = PAGE.read_text().split("<!-- transitions -->")[1].split("<!-- /transitions -->")[0]
    assert shown.strip() == f"```mermaid\n{picture()}\n```"
