"""A classifier of scikit-learn's digits whose ranks train models of their own: by leader SGD, or by DecentLaM."""

from __future__ import annotations

import argparse
import time

import torch
from digits import digits
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=["lsgd", "decentlam"], default="lsgd")
    parser.add_argument("--period", type=int, default=16, help="lsgd: steps between rounds of all ranks")
    parser.add_argument("--topology", default="ring", help="decentlam: ring, grid, exponential or complete")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="lsgd: of a rank; decentlam: of all ranks")
    parser.add_argument("--max-batch", type=int, default=512, help="of all ranks")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="MS", help="sleep per sample, as a GPU would compute"
    )
    return parser.parse_args()


def main() -> None:
    args = options()
    strategy = (
        ones.strategies.Lsgd(period=args.period)
        if args.strategy == "lsgd"
        else ones.strategies.DecentLam(topology=args.topology)
    )
    job = ones.init(batch=args.batch, max_batch=args.max_batch, epochs=args.epochs, strategy=strategy)
    torch.manual_seed(0)
    model = job.ddp(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    train, test = digits()
    loader = job.loader(train)
    for epoch in job.epochs():
        for x, y in loader:
            loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            job.loss(loss)  # leaders are chosen by it
            optimizer.step()
            time.sleep(args.pace * len(y) / 1000)
        scheduler.step()
        right = seen = 0
        with torch.no_grad():
            for x, y in job.evaluate(test, batch=64):  # the leader, or the mean, on all ranks
                right += int((model(x.to(job.device)).argmax(1).cpu() == y).sum())
                seen += len(y)
        accuracy = job.mean(right, seen)
        if job.rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, batch {job.batch} on {job.world} ranks", flush=True)
        job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
