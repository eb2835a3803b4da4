"""Position of training."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainingProgress:
    """Position of training; all counts are since the job's first run unless noted otherwise."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch already used."""
    step: int = 0
    samples: int = 0
    padding: int = 0
    """Samples missing in the last base batches of past epochs; with `samples` a multiple of the base batch."""
    batch: int = 0
    """Global batch last ordered, before it is cut to the GPUs' memory; 0 for the script's own batch."""
    dataset: int = 0
    """Length of an epoch; 0 before the data is known."""
    items: str = ""
    useful: float = 0.0
    """Progress in samples of the base batch: each sample counts with its batch's statistical efficiency."""
    noise: float = 0.0
    """Gradient noise scale last measured, in samples; 0 for none."""
    noise_low: float = 0.0
    """Lower bound of the gradient noise scale, in samples; 0 for none."""
    world: int = 0
    """World size of the last run; 0 before the first."""
    resizes: int = 0
    """Runs that began at another world size than the one before."""
    failures: int = 0
    """Starts that ended without notice or by an error and were followed by another start."""
    trained_s: float = 0.0
    lr_peaks: list[float] = field(default_factory=list)
    """Largest learning rate that the script has set so far, for each optimizer."""
    momentum_power: float = 1.0
    """Power to which the script's momentum was raised in the last step; momentum buffers are scaled by it."""
    admitted: float = 0.0
    """Global batch in force if it exceeds the base batch without needing more samples; else 0."""
    left: int = -1
    """Value of init's `epochs` when the script left the loop over epochs early; -1 if it has not."""
    run_id: str = ""
    """Name of the job's runs for loggers; kept by jobs that resume from its checkpoints."""

    def take_over(self, other: TrainingProgress) -> None:
        """Copy another position into this one."""
        vars(self).update(vars(other))
