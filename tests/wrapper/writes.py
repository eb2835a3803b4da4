"""A script that writes in many ways and flushes in none.

Arguments: a folder, and how it ends (end, exit, raise, signal).
"""

from __future__ import annotations

import atexit
import csv
import gzip
import logging
import logging.handlers
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones

folder, how = Path(sys.argv[1]), sys.argv[2]
job = ones.init(batch=8, epochs=1000 if how == "signal" else 2)
rank = job.rank
order = (folder / f"order-{rank}.txt").open("w")
atexit.register(lambda: order.write("atexit first\n"))
atexit.register(lambda: order.write("atexit second\n"))
ended = threading.Event()


def wait_for_the_end() -> None:
    while threading.main_thread().is_alive() and not ended.wait(0.01):
        pass
    order.write("thread\n")


threading.Thread(target=wait_for_the_end).start()
logger = logging.getLogger("rows")
logger.setLevel(logging.INFO)
logger.propagate = False
file = logging.FileHandler(folder / f"log-{rank}.txt")
logger.addHandler(logging.handlers.MemoryHandler(1_000_000, target=file))
rows = csv.writer(kept := (folder / f"rows-{rank}.csv").open("w"))
archive = gzip.open(folder / f"rows-{rank}.gz", "wt")  # noqa: SIM115  # left open, as scripts do
model = job.ddp(torch.nn.Linear(4, 1))
optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
x = torch.ones(80, 4)
loader = job.loader(TensorDataset(x, x[:, :1]))
try:
    with (folder / f"with-{rank}.txt").open("w") as held:
        try:
            for epoch in job.epochs():
                for inputs, target in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(inputs), target).backward()
                    optimizer.step()
                    time.sleep(0.005)
                    row = f"{epoch},{job.progress.step}"
                    rows.writerow(row.split(","))
                    logger.info(row)
                    print(row, file=held)
                    print(row, file=archive)
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise ValueError("as asked for")
        finally:
            print("closed", file=held)
finally:
    ended.set()
