"""The present global batch, and the division of a step's samples over the ranks. Limits of a strategy and uneven shares
take effect here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ones_wrapper.checkpoint import SavedState
from ones_wrapper.data.feed import Cut
from ones_wrapper.data.shares import Shares
from ones_wrapper.data.uneven import Uneven
from ones_wrapper.files.job_io import write_spec
from ones_wrapper.gradients.schedule import counted
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.growth import efficiency
from ones_wrapper.run import replicas, resize_log
from ones_wrapper.run.local_batch import LocalBatch
from ones_wrapper.run.settings import Common


class StepSizes:
    """Batch and division of one run. Methods are not collective unless they say otherwise."""

    def __init__(self, common: Common, spec: Spec) -> None:
        """`spec` is the spec as the script declared it. Collective."""
        group, settings = common.group, common.settings
        self._group, self._settings, self._directory = group, settings, common.directory
        self._progress, self._loop = common.progress, common.loop
        self.local_batch = LocalBatch(common.directory, spec, group)
        self.spec = self.local_batch.applied(spec)
        self.division = replicas.divide(self.spec, group.world, group.rank, settings.equal)
        if note := replicas.look_at(self.spec, group.world):
            self._group.say(note)
        self.uneven = Uneven(group.device, self.local_batch.own) if settings.uneven else None
        self.generation = 0
        """Generation of the present membership; 0 before any change."""
        self.batch = 0
        self.put_in_force()

    @property
    def shares(self) -> Shares | None:
        """Uneven shares of the ranks; None if shares are even."""
        return self.uneven.shares if self.uneven is not None else None

    @property
    def cut(self) -> Cut:
        """Batch and division from which this rank's passes in a step follow."""
        return replace(self.division, batch=self.batch, uneven=self.shares, least=self._loop.least)

    @property
    def least_step(self) -> int:
        """Smallest number of samples in a step; fewer at the end of an epoch are not used."""
        division = self.division
        return max(division.whole, self._loop.least * division.replicas) if self._settings.equal else 1

    @property
    def cut_by(self) -> tuple[object, ...]:
        """Values whose change requires a new division of the rest of the epoch."""
        return self.batch, self.generation, self.shares

    def rated(self, samples: int) -> float:
        """Return the number of samples that sets the learning rate of a step of `samples` samples: all, or one
        replica's (`Strategy.local_rate`)."""
        return samples / self._rated

    @property
    def _rated(self) -> int:
        strategy = self._settings.strategy
        return self.division.replicas if strategy is not None and strategy.local_rate else 1

    @property
    def lr_factor(self) -> float:
        """Ratio of the optimizer's learning rate to the rate that the script set."""
        return self._loop.rate.factor(self._progress, self.rated(self.batch))

    def admit(self) -> bool:
        """Check again if the present batch needs no more samples than the base batch (`Rate.admit`), and update the
        spec. Return True if that changes learning rate and momentum."""
        rate, progress = self._loop.rate, self._progress
        changed = rate.admit(progress, self.rated(self.batch))
        if (free := rate.free(progress)) != self.spec.grown:
            self.spec = replace(self.spec, grown=free)
        return changed

    def put_in_force(self) -> None:
        """Use the newest order's batch from now on, rounded to one that the ranks can use."""
        spec, wanted = self.spec, self._progress.batch
        wanted = wanted or spec.base_batch * self._rated
        self.batch = batch = replicas.in_force(spec, wanted, self.division)
        if self._settings.equal and wanted % self.division.quantum:
            self._group.say(
                f"{self._group.world} ranks take {batch} samples a step in place of {wanted}, in equal shares"
            )
        if batch % spec.multiple_of:
            self._group.say(
                f"{self._group.world} ranks take {batch} samples a step, which is no multiple of {spec.multiple_of}"
            )

    def use_batch(self) -> str:
        """Tell the strategy about the present batch; log and return the strategy's note."""
        strategy = self._settings.strategy
        note = strategy.batch_in_force(self.batch) if strategy is not None else ""
        if note:
            self._group.say(note)
        self.batch_fixed()
        return note

    def write_spec(self) -> None:
        """Write `spec.json`, from which the companion reads the job's limits, on rank 0."""
        if self._group.rank == 0:
            write_spec(self._directory, self.spec)

    def complete(self, samples: int) -> None:
        """Complete the spec after the models are built; `samples` is the number of samples in an epoch."""
        spec, strategy = self.spec, self._settings.strategy
        limits = replicas.limits_again(strategy, spec, self._group)
        # Strategies have their own formulas for the bytes that they send.
        averaged = self._loop.exchanges.gradient_bytes if limits is None else 0
        rule = self._loop.rate.rule
        spec = replace(spec, limits=limits, gradient_bytes=averaged, dataset=samples, rule=rule)
        self._found(replicas.as_found(spec, self._group.world, self.local_batch.found))

    def probe(self, one_pass: Callable[[int], object], state: SavedState) -> int:
        """Return the result of `Job.probe`. Collective."""
        exchanges, world = self._loop.exchanges, self._group.world
        together = self.division.replicas < world or (exchanges.gathers and world > 1)
        with exchanges.trying():
            found = self.local_batch.probe(one_pass, state, self.division.unit, together)
        self._found(replicas.as_found(self.spec, world, found))
        if self.uneven is not None:
            self.uneven.most = found.samples
        self.put_in_force()
        return found.samples

    def _found(self, spec: Spec) -> None:
        self.spec = spec
        self.division = replicas.divide(spec, self._group.world, self._group.rank, self._settings.equal)

    def count(self, total: int) -> float:
        """Count a step of `total` samples; return the number of useful samples."""
        progress, base = self._progress, self.spec.base_batch
        useful = total * efficiency(self.batch, base, progress.noise or None, progress.admitted)
        progress.padding += counted(progress, total, self.batch, base, self.least_step) - total
        progress.cursor += total
        progress.samples += total
        progress.useful += useful
        progress.step += 1
        if self.uneven is not None:
            self.uneven.step(self._loop.part.share.samples)
        return useful

    def divide(self, measured: tuple[int, ...]) -> None:
        """Update uneven shares from the times that the ranks measured."""
        if self.uneven is None or not measured:
            return
        passes = self.division.passes(self.batch)
        if self.uneven.agreed(measured, self.batch, passes) and self.uneven.shares is not None:
            self._group.say(
                resize_log.shares_changed(self.uneven.shares.samples(self.batch, passes), self._progress.step)
            )

    def order(self, wanted: int, number: int | None) -> bool:
        """Store the batch `wanted` of an order, for `put_in_force`. If the strategy forbids a change now, log it and
        return False."""
        strategy, progress = self._settings.strategy, self._progress
        if strategy is not None and strategy.batch_fixed() and wanted != progress.batch:
            self._group.say(f"order {number}: the batch stays {self.batch}, which must not change now in this strategy")
            return False
        progress.batch = wanted
        return True

    def batch_fixed(self) -> None:
        """Write the spec again if the strategy's limits have changed, for example if it now forbids changes of the
        batch."""
        strategy, limits = self._settings.strategy, self.spec.limits
        if strategy is None or limits is None:
            return
        now = strategy.limits_now(limits)
        if now is not limits:
            self.spec = replace(self.spec, limits=now)
            self.write_spec()

    def ranks_changed(self, generation: int, max_local: int, batch: int, order: int | None) -> None:
        """Continue with new ranks, whose devices hold passes of `max_local` samples. Use `batch` from now on, unless it
        is 0."""
        self.generation = generation
        self._found(replace(self.spec, max_local_batch=max_local))
        if (strategy := self._settings.strategy) is not None:
            strategy.bind(self._group)
        if batch:
            self.order(batch, order)
        self.put_in_force()
        self._loop.rate.resume(self._progress)
        self.admit()
        if self.uneven is not None:
            self.uneven.ranks_changed()
