"""How files are given to pytest's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers import Mixed


class Worker:
    """As xdist has one, without a process: what it was sent stays until `did`."""

    def __init__(self, name: str, tests: list[str]) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.tests, self.sent, self.shutting_down = tests, list[int](), False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.sent += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def given(workers: int, slurm: int, others: int) -> tuple[dict[str, list[str]], list[str]]:
    """The files that each worker ran, where all take equally long, and which workers ended before the rest."""
    files = [f"tests/endtoend/test_{i}.py" for i in range(slurm)]
    files += [f"tests/{'wrapper' if i % 2 else 'rules'}/test_{i}.py" for i in range(others)]
    tests = [f"{file}::test_{i}" for file in files for i in range(3)]
    options = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=options, getvalue=lambda name: [f"{workers}*popen"])
    mixed = Mixed(config)
    there: list[Any] = [Worker(f"gw{i}", tests) for i in range(workers)]
    for worker in there:
        mixed.add_node(worker)
        mixed.add_node_collection(worker, tests)
    mixed.schedule()
    ran: dict[str, list[str]] = {worker.gateway.id: [] for worker in there}
    early = []
    while busy := [worker for worker in there if worker.sent]:
        for worker in busy:
            number = worker.sent.pop(0)
            ran[worker.gateway.id].append(tests[number].split("::")[0])
            mixed.mark_test_complete(worker, number)
            if worker.shutting_down and mixed.workqueue and worker.gateway.id not in early:
                early.append(worker.gateway.id)
    assert sorted(test for one in ran.values() for test in one) == sorted(test.split("::")[0] for test in tests)
    assert all(worker.shutting_down for worker in there)
    return ran, early


@pytest.fixture(autouse=True)
def _files_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.workers.on_slurm", lambda file: "endtoend" in file)


def test_two_workers_wait_for_slurm_and_the_others_compute() -> None:
    """Protects the time that all tests take, and each of them being run once."""
    ran, early = given(4, 6, 40)
    on_slurm = [{"endtoend" in file for file in ran[f"gw{i}"]} for i in range(4)]
    assert on_slurm[2:] == [{False}, {False}]
    assert len(early) == 1 and early[0] in ("gw0", "gw1")
    # The one that goes on then computes too, and begins no ranks while others do.
    assert sorted(map(len, on_slurm[:2])) == [1, 2]
    assert not any("wrapper" in file for i in (0, 1) for file in ran[f"gw{i}"])
    assert all("wrapper" in ran[f"gw{i}"][0] for i in (2, 3))


def test_fewer_workers_run_all_to_the_end() -> None:
    """Protects `make check` and small machines; and a run in which most needs a Slurm."""
    for workers, slurm, others in ((1, 3, 3), (2, 0, 12), (3, 4, 20), (4, 20, 4)):
        ran, early = given(workers, slurm, others)
        assert all(ran.values()) and not early
