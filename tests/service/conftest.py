"""What tests of the service begin with."""

from __future__ import annotations

import pytest

from tests.act.plain_job import Slurm


@pytest.fixture
def url(empty_url: str) -> str:
    return empty_url


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()
