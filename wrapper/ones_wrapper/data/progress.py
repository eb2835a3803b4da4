"""Position of training."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Position of training; all counts are since the job's first run unless noted otherwise."""

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
    noise_low: float = 0.0
    """Its lower bound; 0 while there is none."""
    world: int = 0
    """World size of the last run; 0 before the first."""
    resizes: int = 0
    """Runs that began at another world size than the one before."""
    failures: int = 0
    """Starts that ended without a bye, or with that of an error, and were followed by another."""
    trained_s: float = 0.0
    """Seconds that the job has trained."""
    lr_peaks: list[float] = field(default_factory=list)
    """The largest rate that the script set so far, of each optimizer."""
    momentum_power: float = 1.0
    """The power of the script's momentum that the last step was made with: momentum buffers are in its measure."""
    admitted: float = 0.0
    """The batch in force, while it is larger than the base batch and costs no samples."""
    left: int = -1
    """`epochs` of init when the script left the loop over epochs before its end; -1: it has not."""
    run_id: str = ""
    """The job's name for loggers; of the first job where others went on from its checkpoints."""

    def take_over(self, other: Progress) -> None:
        """Go on from where another stands."""
        vars(self).update(vars(other))
