"""Position of the training, which checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainingProgress:
    """Position of the training. Counts begin with the job's first run unless noted otherwise."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the present epoch that were used."""
    step: int = 0
    samples: int = 0
    padding: int = 0
    """Samples that were missing, over past epochs, to fill each epoch's last base batch. At the end of an epoch,
    `samples` + `padding` is a multiple of the base batch."""
    batch: int = 0
    """Global batch of the last order, before limits; 0 for the script's own batch."""
    dataset: int = 0
    """Samples in an epoch; 0 before the data is known."""
    items: str = ""
    useful: float = 0.0
    """Progress in samples of the base batch: each sample is weighted with the statistical efficiency of its batch."""
    noise: float = 0.0
    """Newest gradient noise scale, in samples; 0 if none was measured."""
    noise_low: float = 0.0
    """Lower bound of the gradient noise scale, in samples; 0 if unknown."""
    world: int = 0
    """World size of the last run; 0 before the first."""
    resizes: int = 0
    """Number of runs that began at another world size than the run before."""
    failures: int = 0
    """Number of starts that ended with an error, or without a last report, before another start."""
    trained_s: float = 0.0
    lr_peaks: list[float] = field(default_factory=list)
    """Largest learning rate that the script has set so far, for each optimizer."""
    momentum_power: float = 1.0
    """Power to which the script's momentum was raised in the last step. Momentum buffers in the checkpoint fit this
    power."""
    admitted: float = 0.0
    """Present global batch, if it is above the base batch and needs no more samples than that (`Rate.admit`); else
    0."""
    left: int = -1
    """Number of epochs given to `init`, if the script left its loop over epochs early; else -1."""
    run_id: str = ""
    """Name of the job's runs in experiment loggers. A job that resumes from this job's checkpoint keeps the name."""

    def take_over(self, other: TrainingProgress) -> None:
        """Copy all values of another object into this one."""
        vars(self).update(vars(other))
