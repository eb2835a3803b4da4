"""What an index and those who cite read of the three distributions is the same, and true."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import ones_db
import ones_wrapper
import slurm_ones

TOP = Path(__file__).parents[2]
FOLDERS = {"slurm-ones": TOP, "ones-db": TOP / "db", "ones-wrapper": TOP / "wrapper"}


def metadata(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(FOLDERS[name] / "setup.cfg")
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_all_three_say_the_same(name: str) -> None:
    """Author, licence and versions of Python; a classifier for the oldest that may install it."""
    here, main = metadata(name)["metadata"], metadata("slurm-ones")["metadata"]
    assert here["name"] == name
    assert (here["author"], here["license"]) == (main["author"], main["license"])
    pythons = re.findall(r"Python :: (3\.\d+)", here["classifiers"])
    assert pythons == re.findall(r"Python :: (3\.\d+)", main["classifiers"])
    assert metadata(name)["options"]["python_requires"] == f">={pythons[0]}"


def test_one_version() -> None:
    (cited,) = re.findall(r"^version: (.+)$", (TOP / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert {slurm_ones.__version__, ones_db.__version__, ones_wrapper.__version__} == {cited}
    for name in ("slurm-ones", "ones-db"):
        pinned = re.findall(r"^ones-\w+(?:\[\w+\])?==(.+)$", metadata(name)["options"]["install_requires"], flags=re.M)
        assert pinned and {*pinned} == {cited}
