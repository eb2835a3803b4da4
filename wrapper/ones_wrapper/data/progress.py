"""How far training has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How far training has come; all counts are since the job's first run unless said otherwise."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch already used."""
    step: int = 0
    samples: int = 0
    padding: int = 0
    """Samples by which the last base batches of epochs were not full; with `samples` these are whole steps."""
    batch: int = 0
    """Global batch last ordered, before it is cut to what the GPUs hold; 0 for the script's own."""
    dataset: int = 0
    """Length of an epoch; 0 before the data is known."""
    items: str = ""
    """Fingerprint of the data."""
    useful: float = 0.0
    """Progress in samples of the base batch: each sample counts with its batch's statistical efficiency."""
    noise: float = 0.0
    """Gradient noise scale last measured, in samples; 0 for none."""
    world: int = 0
    """World size of the last run; 0 before the first."""
    resizes: int = 0
    """Runs that began at another world size than the one before."""
    failures: int = 0
    """Starts that ended without a bye, or with that of an error, and were followed by another."""
    trained_s: float = 0.0
    """Seconds that the job has trained."""
    lr_factor: float = 0.0
    """Learning rate in force over the script's own; 0 before the first step."""
    lr_target: float = 0.0
    """Where it goes, for the batch in force."""
    lr_ramp: int = 0
    """Steps that are left on the way there."""
    left: int = -1
    """`epochs` of init when the script left the loop over epochs before its end; -1: it has not."""
    run_id: str = ""
    """The job's name for loggers; of the first job where others went on from its checkpoints."""

    def take_over(self, other: Progress) -> None:
        """Go on from where another stands."""
        vars(self).update(vars(other))
