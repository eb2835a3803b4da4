"""What scripts do besides the documented loop, third part: whole scripts, whose text is read."""

from __future__ import annotations

import os
import runpy
import signal
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from ones_wrapper import testing
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.script.line import is_script_file
from ones_wrapper.script.source import counter, cut, divided, files, kept, names_rank, ranges
from tests.marks import nightly
from tests.wrapper.test_more_scripts import START
from tests.wrapper.test_scripts import Loop, Numbers, logged

BEGIN = """
import random
import os
from collections import deque
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
import ones_wrapper as ones
job = ones.init(batch=4, epochs=2)
data = TensorDataset(torch.rand(12, 2))
other = DataLoader(TensorDataset(torch.rand(8, 2)), batch_size=4)
net = nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
"""
PREPARE = "model, optimizer, loader = job.prepare(net, optimizer, data)\n"
STEP = "optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); optimizer.step()\n"
LOOP = f"for epoch in job.epochs():\n    for (x,) in loader:\n        {STEP}"
COUNTED = f"for epoch in job.epochs():\n    for i, (x,) in enumerate(loader):\n        {STEP}"
IN_FUNCTION = f"""
def train():
    losses = []
    for (x,) in loader:
        {STEP.strip()}; losses.append(loss.item())
for epoch in job.epochs():
    train()
"""
STREAM = """
whole = data
class Stream(IterableDataset):
    def skip(self, n):
        return [(whole[i][0],) for i in PART][n:]
    def __iter__(self):
        return iter(self.skip(0))
"""
CACHE = """
whole = data
class Cached(Dataset):
    def __init__(self):
        self.cache = {}
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return self.cache.setdefault(i, whole[i])
"""
MEMORY = """
class ReplayMemory:
    def __init__(self):
        self.items = deque(maxlen=100)
memory = ReplayMemory()
"""
STOPPER = """
class Stopper:
    def __init__(self):
        self.wait, self.lowest = 0, None
    def __call__(self, loss):
        self.wait = self.wait + 1
        self.best_of_all = loss
stopper = Stopper()
"""
TRAINER = """
class Trainer:
    def __init__(self):
        self.stopper = Stopper()
    def improves(self):
        return self.stopper.wait
trainer = Trainer()
del stopper
"""
SUMMED = LOOP.replace("    for", "    total, seen = 0.0, 0\n    for", 1) + "        total += loss.item()\n"
TIMED = "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)\n"
BY_HAND = """        for group in optimizer.param_groups:
            group["lr"] *= 0.9
"""
OPTIONS = "class Options(dict):\n    __getattr__ = dict.__getitem__  # KeyError for other names\noptions = Options()\n"
SEEDED = "torch.manual_seed(5 + job.rank)\n"
TOY = """
class Toy(Dataset):
    def __init__(self):
        self.x = torch.randn(12, 2)
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return (self.x[i],)
"""


def scripted(text: str, path: Path) -> None:
    path.write_text(text)
    os.chdir(path.parent)
    runpy.run_path(str(path), run_name="__main__")


SECOND, CUT, EVERYWHERE = "a second DataLoader", "data is cut by rank and world size", "is called on all ranks"
HOOKED, DRAWN = "a hook on a parameter's gradient", "data is drawn (train.py:"
DIVIDED = "`total / len(loader)` (train.py:AT): the sum begins again at each resize"
COUNTER, COLLECTED, EMPTIED = "counts from 0 again", "history (train.py:", "is open for writing from its beginning"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PREPARE + LOOP.replace("(x,) in loader", "(x,), (u,) in zip(loader, other)"), SECOND),
        (PREPARE + "endless = iter(other)\n" + LOOP + "        next(endless, None)\n", SECOND),
        (PREPARE + LOOP + "    model.eval()\n    for (u,) in other:\n        net(u)\n    model.train()\n", ""),
        (PREPARE + LOOP + "        net.eval()\n        [net(u) for (u,) in other]\n        net.train()\n", ""),
        (PREPARE + LOOP + "        with torch.no_grad():\n            [net(u) for (u,) in other]\n", ""),
        (STREAM.replace("PART", "range(job.rank, 12, job.world)") + "data = Stream()\n" + PREPARE + LOOP, CUT),
        (PREPARE + LOOP + "    torch.save(net.state_dict(), 'last.pt')\n", EVERYWHERE),
        (PREPARE + LOOP + "    name = f'{job.rank}.pt'\n    torch.save(net.state_dict(), name)\n", ""),
        (PREPARE + LOOP + "    if job.rank == 0:\n        torch.save(net.state_dict(), 'last.pt')\n", ""),
        ("log = open('log.csv', 'w') if job.rank == 0 else None\n" + PREPARE + LOOP, EMPTIED),
        ("out = open('out.txt', 'w')\nout.detach()\nlog = open('log.csv', 'w')\n" + PREPARE + LOOP, EMPTIED),
        (PREPARE + COUNTED + "        if i % 3 == 0:\n            job.evaluate(data)\n", COUNTER),
        (PREPARE + COUNTED + "        if i % 3 == 0:\n            print(loss.item())\n", ""),
        (MEMORY + PREPARE + LOOP + "        memory.items.append(x)\n", "ReplayMemory.items (train.py:"),
        (MEMORY.replace("deque(maxlen=100)", "torch.zeros(9, 2)") + PREPARE + LOOP, "ReplayMemory has a state"),
        (MEMORY.replace("deque(maxlen=100)", "data.tensors[0]").replace("ReplayMemory", "InMemoryDataset")
         + PREPARE + LOOP, ""),
        ("own = torch.Generator()\n" + PREPARE + LOOP + "        torch.rand(1, generator=own)\n", "own (train.py:"),
        ("own = torch.Generator()\ntorch.rand(1, generator=own)\n" + PREPARE + LOOP, ""),
        ("net.bias.register_hook(torch.nn.functional.relu)\n" + PREPARE + LOOP, ""),
        ("net.bias.register_hook(lambda g: g.clamp(-1, 1))\n" + PREPARE + LOOP, HOOKED),
        ("def halve(g):\n    g.mul_(0.5)\nnet.bias.register_hook(halve)\n" + PREPARE + LOOP, HOOKED),
        ("net.bias.register_hook(lambda g: print(g.norm()))\n" + PREPARE + LOOP, ""),
        ("def shown(g):\n    print(g.norm())\n    return g\nnet.bias.register_hook(shown)\n" + PREPARE + LOOP, ""),
        (STOPPER + PREPARE + LOOP, "Stopper.wait (train.py:"),
        (STOPPER + TRAINER + PREPARE + LOOP, "Stopper.wait (train.py:"),
        (STOPPER + TRAINER.replace("= Stopper()", "= [Stopper()]") + PREPARE + LOOP, "Stopper.wait (train.py:"),
        ("from types import SimpleNamespace\nstate = SimpleNamespace(seen=0)\n" + PREPARE + LOOP
         + "        state.seen = state.seen + 1\n", "SimpleNamespace.seen (train.py:"),
        (PREPARE + "best = torch.tensor(9.0)\n" + LOOP + "        best = loss.detach()\n", "best (train.py:"),
        (PREPARE + "best = None\n" + LOOP + "        print(loss.item())\n        best = loss.item()  # AT\n",
         "best (train.py:AT): what the script counts"),
        (PREPARE + SUMMED + "    print(total / len(loader))  # AT\n", DIVIDED),
        (PREPARE + SUMMED + "        seen += len(x)\n    print(job.mean(total, seen))\n", ""),
        (TIMED + PREPARE + LOOP + "        scheduler.step()\n", "CosineAnnealingLR drives a registered optimizer"),
        (OPTIONS + TIMED + PREPARE + LOOP + "        scheduler.step()\n", "CosineAnnealingLR drives a registered"),
        (PREPARE + LOOP + BY_HAND.replace("0.9", "0.9  # AT"), "at each step (train.py:AT), and no schedule"),
        (OPTIONS + PREPARE + LOOP + BY_HAND.replace("0.9", "0.9  # AT"), "at each step (train.py:AT), and no schedule"),
        (PREPARE + LOOP.replace("    for", "    n = 0\n    for", 1) + "        n += 1\n", ""),
        (PREPARE + "n = 0\n" + LOOP + "        n += 1\n        if n > 9:\n            n = 0\n", "n (train.py:"),
        (SEEDED + "data = TensorDataset(torch.randn(12, 2))\n" + PREPARE + LOOP, DRAWN),
        (SEEDED + TOY + "data = Toy()\n" + PREPARE + LOOP, DRAWN),
        ("def made(n):\n    return torch.randn(n, 2)\n" + SEEDED + "x = made(12)\ndata = TensorDataset(x)\n"
         + PREPARE + LOOP, DRAWN),
        ("data = TensorDataset(torch.randn(12, 2))\n" + SEEDED + PREPARE + LOOP + "        torch.rand(3)\n", ""),
        (SEEDED + "torch.manual_seed(0)\n" + PREPARE + LOOP, ""),
        ("history = []\n" + PREPARE + LOOP + "        history.append(loss.item())\n", COLLECTED),
        ("kept = {'history': []}\n" + PREPARE.replace("data", "kept, data").replace(" loader", " kept, loader")
         + LOOP + "        kept['history'].append(1)\n", ""),
        (PREPARE + LOOP.replace("    for", "    losses = []\n    for", 1) + "        losses.append(1)\n", ""),
        (PREPARE + IN_FUNCTION, ""),
        (CACHE + "data = Cached()\n" + PREPARE + LOOP, ""),
        (MEMORY + PREPARE + LOOP + "        memory.items.append(loss.item())\n", ""),
    ],
)  # fmt: skip
def test_what_a_resize_would_change_is_said_before_it(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Protects the result of a script that goes well on one GPU."""
    _, log = logged(partial(scripted, BEGIN + text, tmp_path / "train.py"), capfd)
    lines = [line for line in log.splitlines() if not line.startswith("ones: init")]
    assert len(lines) == bool(said), log
    marked = [number for number, line in enumerate((BEGIN + text).splitlines(), 1) if line.endswith("# AT")]
    assert said.replace("AT", str(*marked)) in log


@pytest.mark.parametrize(
    ("line", "cuts"),
    [
        ("mine = files[rank::world_size]", True),
        ("mine = files[job.rank * per : (job.rank + 1) * per]", True),
        ("data = data.shard(num_shards=accelerator.num_processes, index=accelerator.process_index)", True),
        ("mine = [one for i, one in enumerate(files) if i % world == dist.get_rank()]", True),
        ("mine = np.array_split(files, world)[rank]", True),
        ("stream = islice(stream, r, None, int(os.environ['WORLD_SIZE']))", True),
        ("stream = split_dataset_by_node(stream, *where)", True),
        ("begin = r * per; mine = files[begin : begin + per]", True),
        ("dist.init_process_group(rank=rank, world_size=world)", False),
        ("print(f'{rank} of {world}'.split())", False),
        ("low = u[:, :rank]", False),
        ("sampler = DistributedSampler(data, num_replicas=world, rank=rank)", False),
        ("mine = files[1:world]", False),
    ],
)
def test_data_cut_by_rank_and_world_size(line: str, cuts: bool, tmp_path: Path) -> None:
    path = tmp_path / "data.py"
    path.write_text(f"world = dist.get_world_size()\nr = int(os.environ['RANK'])\nper = len(files) // world\n{line}\n")
    assert cut(str(path)) == (4 if cuts else 0)


@pytest.mark.parametrize("folder", ["/home/a/.local/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"])
def test_packages_outside_of_the_environment_are_no_scripts(folder: str) -> None:
    """Protects from warnings on torch's own files, as of `pip install --user`."""
    assert not is_script_file(f"{folder}/torch/utils/data/distributed.py")


def test_a_script_comes_before_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the files are called: the first line that is found is named."""
    (tmp_path / "a_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "z_train.py").write_text("import sys\nimport a_module\nfound = files([sys._getframe()])\n")
    found = runpy.run_path(str(tmp_path / "z_train.py"), {"files": files})["found"]
    assert found == [str(tmp_path / "z_train.py"), str(tmp_path / "a_module.py")]


def test_what_follows_a_return_of_other_ranks_depends_on_the_rank(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def save():\n    if rank != 0:\n        return\n    x = 1\n    y = 2\n")
    assert {*ranges(str(tmp_path / "a.py"))} == {range(3, 4), range(4, 6)}


@pytest.mark.parametrize(
    ("guard", "apart"),
    [
        ("if job.rank == 0:\n    SAVE\nelse:\n    wait()", True),
        ("master_process = ddp_rank == 0\nif master_process:\n    SAVE", True),
        ("if args.local_rank in (-1, 0):\n    SAVE", True),
        ("if int(os.environ['RANK']) == 0:\n    SAVE", True),
        ("if args.rank % gpus == 0:\n    SAVE", True),
        ("if state.is_world_process_zero:\n    SAVE", True),
        ("SAVE if rank == 0 else None", True),
        ("saver = Saver() if rank == 0 else None\nif saver:\n    SAVE", True),
        ("@rank_zero_only\ndef save():\n    SAVE", True),
        ("path = 'part-{}.pt'.format(rank)\ntorch.save(net, path)", True),
        ("def train(rank):\n    SAVE", False),
        ("if epoch % 5 == 0 and __name__ == '__main__':\n    SAVE", False),
        ("", True),
    ],
)
def test_files_that_one_rank_writes(guard: str, apart: bool, tmp_path: Path) -> None:
    """Protects scripts that guard their files from a warning. A text that cannot be read says nothing."""
    lines = guard.replace("SAVE", "torch.save(net, 'last.pt')").splitlines()
    (tmp_path / "a.py").write_text("\n".join(lines))
    at = next((number for number, line in enumerate(lines, 1) if "torch.save" in line), 1)
    assert names_rank(str(tmp_path / "a.py"), at) == apart


@pytest.mark.parametrize(
    ("loop", "test", "act", "found"),
    [
        ("step, batch in enumerate(loader)", "(step + 1) % n == 0", "evaluate(model)", "(step + 1) % n == 0"),
        ("step in range(100)", "not step % n", "target.load_state_dict(net.state_dict())", "not step % n"),
        ("i, x in enumerate(loader)", "i >= args.steps", "break", "i >= args.steps"),
        ("x in islice(loader, 100)", "x", "print(x)", "islice(loader, 100)"),
        ("x in loader", "bad", "break", ""),
        ("step, batch in enumerate(loader, job.progress.step)", "step % n == 0", "evaluate(model)", ""),
        ("batch in loader", "step % n == 0", "evaluate(model)", ""),
        ("step, batch in enumerate(loader)", "step % n == 0", "print(step)", ""),
        ("step, (x, target) in enumerate(loader)", "step % n == 0", "print((y == target).sum().item())", ""),
        ("step, (x, target) in enumerate(loader)", "x.isnan().any()", "break", ""),
    ],
)
def test_counters_of_loops(loop: str, test: str, act: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"for {loop}:\n    if {test}:\n        {act}\n")
    assert (counter(str(path), 1) or ("", 0))[0] == found


ADDS = "total += loss.item()"
SEEN = f"{ADDS}; seen += len(x)"


@pytest.mark.parametrize(
    ("adds", "after", "found"),
    [
        (ADDS, "total / len(loader)", True),
        ("total = total + loss.item()", "print(f'{100 * total / len(loader):.1f}')", True),
        ("losses.append(loss.item())", "sum(losses) / len(loader)", True),
        ("self.total += loss", "self.total /= len(self.loader)", True),
        ("sums['loss'] += loss", "mean = sums['loss'] / n_batches", True),
        (ADDS, "steps = max(len(loader), 1); total / steps", True),
        (ADDS, "total = torch.tensor(total); total / len(loader)", True),
        (SEEN, "job.mean(total, len(data))", True),
        (SEEN, "job.mean(total, seen)", False),
        (SEEN, "seen = torch.tensor(seen); total / max(1, seen)", False),
        (f"{ADDS}; self.n_samples += 1", "total / self.n_samples", False),
        (ADDS, "total / (i + 1)", False),
        ("losses.append(loss.item())", "n = len(losses); sum(losses) / n", False),
        ("kept['total'] += loss.item()", "kept['total'] / len(loader)", False),
        (f"{ADDS}; total = 0 if i % 9 else total", "total / len(loader)", False),
        ("seen += len(x)", "seen / (time.time() - start)", False),
        ("spent += time.time() - start", "spent / 3600", False),
        ("self.total += loss", "self.size = len(data); self.total / self.spent", False),
        (ADDS, "total = 0\nfor x in test: total += 1\ntotal / len(test)", False),
        (ADDS, "def evaluate():\n    return total / len(loader)", False),
        ("print(loss)", "total / len(loader)", False),
    ],
)
def test_sums_that_are_divided_by_a_length(adds: str, after: str, found: bool, tmp_path: Path) -> None:
    """Protects the printed loss of an epoch in which a job is resized; sums with a count of their own are as right."""
    path = tmp_path / "a.py"
    path.write_text(f"start = time.time()\nfor i, x in enumerate(loader):\n    {adds}\n{after}\n")
    line = (divided(str(path), 2, ["kept"]) or ("", 0))[1]
    assert line == (4 if found else 0)


@pytest.mark.parametrize("terms", [400, 1100])
def test_a_deep_expression_hides_nothing_else(terms: int, tmp_path: Path) -> None:
    """Protects from a silence about a whole script, and from errors in its calls, because of one long sum in it."""
    path, deep = tmp_path / "a.py", " + ".join(["best"] * terms)
    text = f"for i, x in enumerate(data):\n    steps += 1; total += x; best = {deep}\n    if i % 9:\n        test(x)\n"
    path.write_text(f"{text}print(total / len(loader), {deep})\nif {deep} == 0 or rank == 0:\n    x = 1\n")
    assert divided(str(path), 2) == ("total / len(loader)", 5) and counter(str(path), 2) == ("i % 9", 3)
    assert kept(compile(path.read_text(), path, "exec")) == {"steps": 2, "best": 2}
    assert ranges(str(path)) == [range(7, 8)]
    (test := tmp_path / "b.py").write_text(f"for i, x in enumerate(loader):\n    if i == {deep}:\n        break\n")
    assert counter(str(test), 1) == ("…", 2)


# -- what remains after a signal, and after layers froze ---------------------------------------------------------------


def stops_long_after_a_signal() -> int | None:
    FLAGS.tested = False
    signal.signal(signal.SIGUSR1, lambda *_: None)
    loop = Loop(epochs=6)
    first = os.environ[START] == "0"
    for epoch in loop.job.epochs():
        for batch in loop.loader:
            loop.step(batch)
            if first and loop.job.progress.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        if epoch == 3:
            break
    testing.put(loop.job.progress.step)
    return 1 if first else None


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_an_early_stop_long_after_a_signal_is_the_end(ranks: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects a finished training from going on at its next start, since a handler was called epochs before."""
    put, log = logged(stops_long_after_a_signal, capfd, ranks)
    assert put == [20] * (ranks + 1)
    assert "the next start continues it" not in log


def freezes_in_an_evaluation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loop = Loop(model=net, epochs=2)
    seen = []
    for epoch in loop.job.epochs():
        for batch in loop.loader:
            loop.step(batch)
        loop.model.eval()
        for _, x, _ in loop.job.evaluate(Numbers(7), batch=1):
            net[0].requires_grad_(epoch == 1)
            loop.model(x)
            seen.append(loop.model.broadcast_buffers)
        seen.append(loop.model.broadcast_buffers)
        loop.model.train()
    testing.put((seen, loop.weights))


def test_settings_within_an_evaluation_survive_layers_that_freeze() -> None:
    """Protects ranks with unequally many batches to evaluate, with gradients, from waiting for each other's buffers."""
    (first, weights), (second, others) = (one.value for one in testing.run(freezes_in_an_evaluation, ranks=2))
    assert first == ([False] * 4 + [True]) * 2 and second == ([False] * 3 + [True]) * 2
    assert weights == others
