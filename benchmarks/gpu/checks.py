"""The one table of checks. Names that begin with G need one GPU, with B two or more; docs/gpu.md has the same table."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.harness import Check


def _check(
    name: str, process: str, shows: str, expected: str, function: str, limit_s: float = 90.0, **options: Any
) -> Check:
    return Check(name, process, shows, expected, f"benchmarks.gpu.{function}", 1, options, limit_s)


def _several(name: str, shows: str, expected: str, function: str, limit_s: float = 120.0, **options: Any) -> Check:
    return Check(name, name, shows, expected, f"benchmarks.gpu.{function}", 2, options, limit_s)


def _by_hand(name: str, shows: str, expected: str, why: str) -> Check:
    return Check(name, name, shows, expected, gpus=2, by_hand=why)


_G22 = ("fsdp", "ring", "optimus")
_B13 = ("fsdp", "ring", "lsgd", "decentlam")

# fmt: off
CHECKS = (
    _check("G1", "starts", "fork after preloads", "a tensor on the card, no bad fork", "starts:fork"),
    _check("G2", "starts", "a preload that asks for CUDA", "works; without our default code 2 and its name",
           "starts:poisoned"),
    _check("G3", "starts", "no visible GPU", "a sentence, code 2, no training on CPUs", "starts:none_seen"),
    _check("G4", "groups", "30 changes with NCCL: form, enter, barrier, `new_group`, a step of DDP",
           "64 MiB and 8 threads more at most", "groups:changes", ranks=1, rounds=30),
    _check("G5", "groups", "20 dropped plans", "64 MiB and 2 threads more at most", "groups:dropped"),
    _check("G6", "groups", "forming next to steps of 20 ms", "no step over 5 medians, no heartbeat late by 0.5 s",
           "groups:next_to_training", step_ms=20, steps=300),
    _check("G7", "memory", "memory of the noise scale, as of one of two ranks", "the gradients and 64 MiB at most",
           "steps:noise_memory"),
    _check("G8", "ranks", "gradients of two ranks, shares of 7 and 6, 2 passes", "as one rank within 1e-5, 20 steps",
           "steps:same_gradients", ranks=2),
    _check("G9", "state", "resume: AdamW fused and capturable, fp16, dropout", "equal bits, 20 steps", "state:resume"),
    _check("G10", "state", "a checkpoint behind the training, on another stream", "the old values, of extras too",
           "state:behind"),
    _check("G11", "state", "4 GB: save, behind, load", "stall under 0.6 s, 2 GB/s, host memory 1.2 times the state",
           "state:speed", 160.0),
    _check("G12", "memory", "a probe of 8192 samples, then 30 steps", "no want of memory, 70 % of it in use",
           "steps:probe"),
    _check("G13", "starts", "want of memory in training", "halved once, ends with 0", "starts:out_of_memory"),
    _check("G14", "steps", "the meter against the wall, steps of 200 ms", "within 3 %", "steps:meter"),
    _check("G15", "steps", "no hidden wait in 100 steps", "none, by `set_sync_debug_mode`", "steps:no_hidden_wait"),
    _check("G16", "steps", "a step of 10 ms against plain DDP's", "3 % more at most", "steps:cost"),
    _check("G17", "ranks", "uneven shares without a wait, one rank three times as slow", "25 of 60 samples at most",
           "steps:uneven"),
    _check("G18", "ranks", "blocks 1 → 2 → 1, 300 MB, fused AdamW, batch normalisation",
           "equal bits, each sample once, pause under 1.5 s, memory back", "blocks:change", 120.0, megabytes=300),
    _check("G19", "state", "4 GB from GPU to GPU, and 1 GB to a receiver that needs 25 s",
           "1.5 GB/s, few chunks of host memory; both arrive", "state:two_transfers", 150.0),
    _check("G20", "starts", "a stream that hangs for 60 s", "gone in 15 s with 103, no checkpoint of that step",
           "starts:hung"),
    _check("G21", "compile", "compilations at batches 32, 48, 40 and changes of ranks", "two at most, losses as eager",
           "steps:compilations"),
    _check("G22", "compile", "FSDP2, ring and Optimus in bf16, through a checkpoint", "losses as on the CPU within 1 %",
           "layouts:layouts", kinds=_G22),
    _several("B1", "50 changes of two ranks with NCCL", "64 MiB and 8 threads more at most",
             "groups:changes", ranks=2, rounds=50),
    _several("B2", "the pause by part, blocks 1 → 2", "figures alone", "blocks:pause_by_part", megabytes=300),
    _several("B3", "forming next to steps of 500 ms, on all cards", "as G6",
             "groups:next_to_training", step_ms=500, steps=60, ranks=2),
    _several("B4", "`kill -9` of a block that trains", "the other trains within 20 s, each sample once",
             "blocks:killed_peer"),
    _several("B5", "10 blocks that join and leave", "no hang, pause under 5 s", "blocks:leavers", 300.0, times=10),
    _by_hand("B6", "two blocks on a node with hidden cards", "no P2P, no loop", "it takes Slurm's ConstrainDevices"),
    _several("B7", "newcomers killed as they join", "no step twice, the next one joins", "blocks:killed_newcomer"),
    _several("B8", "an evaluation of 11 minutes on one rank", "the others wait in `barrier()`",
             "groups:patient", 800.0, seconds=660.0),
    _several("B9", "10 GB, blocks 1 → all cards", "arrives each time; GB/s, pauses",
             "blocks:change", 400.0, megabytes=10_000, most=8, pause_s=None),
    _several("B10", "joining with 95 % of the memory in torch's cache", "joins", "blocks:full_cache"),
    _by_hand("B11", "unlike GPUs: uneven shares, one file of memory", "shares by speed", "it takes two kinds of cards"),
    _several("B12", "a term of FSDP2, 1 → 2", "30 s from stop to step at most", "blocks:term"),
    _several("B13", "FSDP2, ring, LSGD and DecentLaM on two ranks", "losses as on the CPU within 1 %",
             "layouts:layouts", 240.0, kinds=_B13, ranks=2),
    _check("B14", "faults", "an ECC error's text in a script; no second GPU needed", "code 105 after another try",
           "starts:broken"),
    _by_hand("B15", "state by the interface that is named", "not the hostname's", "it takes a second, slow network"),
    _by_hand("B16", "torch 2.9 and the newest: B1, B5", "equal bits after changes", "`make gpu` in either environment"),
)
# fmt: on
