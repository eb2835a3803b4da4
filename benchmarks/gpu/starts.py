"""What `ones-run` makes of a node's devices, and how ranks end whose device fails or hangs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.harness import Lab
from benchmarks.gpu.work import Work
from ones_wrapper.files.job_directory import MEMORY
from ones_wrapper.membership.rescue import Ending
from ones_wrapper.process.exit_codes import DEVICE_FAILED, PEER_LOST, USAGE_ERROR

_TENSOR = """
import torch
import ones_wrapper as ones
job = ones.init(batch=8, epochs=1)
total = float(torch.ones(1000, device=job.device).sum())
print("device", job.device.type, total, torch.cuda._is_in_bad_fork(), flush=True)
"""
_POISON = "import torch\ntorch.cuda.is_available()\n"
_NCCL = "import ones_wrapper as ones\nones.init(batch=8, epochs=1, backend='nccl')\nprint('trained')\n"
_MEMORY = """
import torch
import ones_wrapper as ones
job = ones.init(batch=64, max_local_batch=64, max_accumulation_steps=8, epochs=1)
cuda = job.device.type == "cuda"
if cuda:
    torch.cuda.set_per_process_memory_fraction(0.1)
    unit = int(0.15 * torch.cuda.get_device_properties(job.device).total_memory) // 64
model = job.ddp(torch.nn.Linear(8, 1))
optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader(torch.utils.data.TensorDataset(torch.ones(256, 8)))
for _ in job.epochs():
    for (x,) in loader:
        held = None
        if cuda:
            held = torch.empty(len(x) * unit, dtype=torch.uint8, device=job.device)
        elif len(x) > 32:
            raise torch.OutOfMemoryError("emulated")
        loss = model(x.to(job.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
_BROKEN = """
import ones_wrapper as ones
job = ones.init(batch=8, epochs=1)
raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


def _start(lab: Lab, script: str, *options: str, **env: str) -> tuple[int, str]:
    """The exit code of `ones-run` and what it printed."""
    path = lab.folder / "train.py"
    path.write_text(script)
    command = ("-m", "ones_wrapper.launch", "--gpus-per-node=1", *options, str(path))
    given = {"PYTHONPATH": f"{lab.folder}{os.pathsep}{os.environ['PYTHONPATH']}", **lab.env(), **env}
    done = lab.run(*command, **given)
    return done.returncode, done.stdout


def fork(lab: Lab) -> None:
    code, text = _start(lab, _TENSOR, "--preload", "torchvision,transformers,accelerate")
    device = lab.size("cuda", "cpu")
    lab.require("a preloaded rank uses its device", (code, f"device {device} 1000.0 False" in text), (0, True))


def poisoned(lab: Lab) -> None:
    (lab.folder / "poison.py").write_text(_POISON)
    lab.require("a preload that asks for CUDA", _start(lab, _TENSOR, "--preload", "poison")[0], 0)
    code, text = _start(lab, _TENSOR, "--preload", "poison", PYTORCH_NVML_BASED_CUDA_CHECK="0")
    if not lab.rehearsal:  # without a card nothing can be poisoned
        lab.require("without the default, (code, its name)", (code, "poison" in text), (USAGE_ERROR, True))


def none_seen(lab: Lab) -> None:
    """Without a build for CUDA nothing says that there should be cards: then by the backend."""
    env = {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "1"}
    code, text = _start(lab, lab.size(_TENSOR, _NCCL), **env)
    named = lab.size("see 0 GPUs", "needs GPUs") in text
    lab.require("(code, names the reason, trains)", (code, named, "trained" in text), (USAGE_ERROR, True, False))


def out_of_memory(lab: Lab) -> None:
    code, text = _start(lab, _MEMORY)
    lab.require("(code, another start)", (code, "the next takes 32" in text), (0, True))
    lab.require("found", json.loads((lab.folder / "job" / MEMORY).read_text())["found"], 32)


def broken(lab: Lab) -> None:
    code, _ = _start(lab, _BROKEN)
    lab.require("code after another try", code, DEVICE_FAILED)


def _in_a_fork(body: Callable[[], None], limit_s: float) -> tuple[int, float]:
    """The exit code of a process that runs the body, -1 for one that hangs, and the seconds that it took."""
    sys.stdout.flush()
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(70)
    while time.monotonic() - began < limit_s:
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1]), time.monotonic() - began
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1, limit_s


def _hung(device: torch.device, by_watch: bool, ready: Path, wrote: Path) -> None:
    work = Work(device)
    ending = Ending(device, wrote.touch, lambda: None)
    if device.type == "cuda":
        work(60_000)
    ending.marks.step()
    ready.write_text(str(time.monotonic()))
    if by_watch:
        ending.by_watch(lambda: None, lambda: os._exit(PEER_LOST))
    else:
        ending.by_script(lambda: None)
        if device.type == "cuda":  # what the script's thread may do next
            torch.cuda.synchronize(device)
        os._exit(PEER_LOST)


def hung(lab: Lab) -> None:
    device = torch.device(lab.size("cuda", "cpu"))
    for who in ("watch", "script"):
        ready, wrote = lab.folder / f"ready-{who}", lab.folder / f"wrote-{who}"

        def body(who: str = who, ready: Path = ready, wrote: Path = wrote) -> None:
            _hung(device, who == "watch", ready, wrote)

        code, _ = _in_a_fork(body, 50.0)
        lab.require(f"by the {who}: exit code", code, PEER_LOST)
        lab.measure("s until the process was gone", time.monotonic() - float(ready.read_text()), most=15.0)
        lab.require("a checkpoint of a step that is not done", wrote.exists(), lab.rehearsal)
