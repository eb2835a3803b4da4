"""Slurm's commands, as `ones-run` calls them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

TIMEOUT_S = 30.0


def run_slurm(command: Sequence[str]) -> tuple[str, str]:
    """Run a Slurm command; return its output and an error, "" on success."""
    # Times as numbers, messages in English, and no format of the user's own.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_"))}
    env |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=env,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "", f"there is no {command[0]} here"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]}: no answer within {TIMEOUT_S:.0f} s"
    except OSError as error:
        return "", str(error)
    why = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}"
    return done.stdout, why if done.returncode else ""
