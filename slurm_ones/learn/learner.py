"""What is known of each job: its history turned into the models that policies weigh."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ones_db import JobHistory
from ones_wrapper.protocol import Spec
from slurm_ones.learn.efficiency import CAUTIOUS as CAUTIOUS_NOISE
from slurm_ones.learn.efficiency import NoiseEfficiency
from slurm_ones.learn.hierarchy import GroupPath, JobEvidence, Tree, found_widths
from slurm_ones.learn.histories import (
    by_terms,
    dataset_of,
    epochs_in,
    inexact,
    is_wired,
    join_of,
    kin_of,
    leave_of,
    log_of,
    own_noise,
    plain_spec,
    points_in,
    progress_in,
    ready_of,
    reshards,
    training_after,
    unheard_epochs,
    without_bytes,
)
from slurm_ones.learn.kinds import Factor, KindEvidence, KindFactors, base_kind, fit_on, on_kinds, prior_on, ratios
from slurm_ones.learn.progress import BetaProgress, TrainingState, at_least
from slurm_ones.learn.step_time import CAUTIOUS, WIRED, Fit, Prior, fit_all, layout_of
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.learn.workload import script
from slurm_ones.policy.contract import EfficiencyModel, Progress, ThroughputModel

NOWHERE = GroupPath(None, None, "")
"""Of a job that has told nothing."""
PEERS = 3
"""Finished jobs of other users, with the same spec, from which on they bound what a job is believed to be able to."""
RESIZE_S = 30.0
"""Seconds that a resize is expected to interrupt training, before any did."""
RESHARD = 2.0
"""How much longer it is expected to take where the checkpoint is cut anew, before any did: all of it is read and
written once more."""
JOIN_S, LEAVE_S, READY_S = 0.5, 0.05, 8.0
"""The same where blocks join or leave, and seconds until those that join are ready: before any did, as it was measured
of small models (docs/benchmarks.md)."""
TERM_S = 5.0
"""The same where a change begins a term from a checkpoint, since state does not move from memory to memory. A guess:
ranks fork and the script begins, about a second of a small model, and a large one is written and read besides."""

SPARE = 100
"""Jobs whose models are kept beyond as many as were ever looked at at once; those that reported last."""
SCRIPTS = 10_000
"""Scripts, by user and name, whose last spec is kept."""


@dataclass(frozen=True)
class JobModel:
    """What is known of one job."""

    spec: Spec | None
    """What it can do, as it told, or as jobs of the same script did before it; None where neither has."""
    throughput: ThroughputModel
    efficiency: EfficiencyModel
    progress: Progress
    samples: float
    """Progress since its first run, in samples of the base batch."""
    losses: tuple[tuple[float, float], ...]
    """(epochs done, loss) at the ends of its epochs."""
    resize_s: float
    """Seconds that a resize is expected to interrupt its training."""
    dataset: int = 0
    """Samples in an epoch, as told, or else as the epochs that ended had; 0 where neither is known."""
    shrink_s: float | None = None
    """Seconds that giving up GPUs is expected to interrupt its training; None where it is `resize_s` as well."""
    prepare_s: float = 0.0
    """Seconds that it holds GPUs which it gains before they train."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Its model on each of the kinds of GPU that were asked about."""


@dataclass(frozen=True)
class _Switches:
    """What changes of jobs of blocks cost, in seconds: that blocks joined, that they left, until they were ready, and
    either where it begins a term."""

    join_s: float = JOIN_S
    leave_s: float = LEAVE_S
    ready_s: float = READY_S
    term_s: float = TERM_S


@dataclass(frozen=True)
class _Learned:
    """The throughput model of a job, and what it follows from."""

    history: JobHistory
    prior: Prior
    model: MeasuredThroughput
    on: dict[str, ThroughputModel] = field(default_factory=dict)
    """The model on kinds of GPU that were asked about."""


class Learner:
    """Turns histories into models.

    What finished jobs teach is fitted anew when one finishes; a running job's models, when it has reported something
    new. Jobs that tell the same spec (base batch, local batch, dataset, epochs) are taken to run the same script, and
    those that tell the same batches to be of one family: what is expected of a job is what its own user's jobs of that
    spec measured, shrunk towards others' of that spec, those towards the family, and that towards the site
    (`hierarchy`, which also bounds what one user teaches about other people's jobs). How wide intervals are follows
    from how far off such expectations were (`widths`). A job that has not run yet has told nothing: it is taken for
    what jobs of the same user and name told last, where the name may differ in a number at its end.
    """

    def __init__(self, *, seed: int = 0, gpu_speeds: Mapping[str, float] | None = None) -> None:
        """`gpu_speeds` is what the site guesses of its kinds of GPU."""
        self._seed = seed
        self._finished: Sequence[JobHistory] = ()
        self._past: dict[int, list[tuple[JobHistory, Fit]]] = {}
        """Finished jobs, and their fits: as they told, and then as if they had not said what they send."""
        self._progress = BetaProgress(seed=seed)
        self._trees = {False: Tree((), CAUTIOUS), True: Tree((), WIRED)}
        self._priors: dict[tuple[bool, GroupPath, str], Prior] = {}
        self._widths = {False: (1.0, 1.0), True: (1.0, 1.0)}
        self._own: Counter[tuple[Hashable, str]] = Counter()
        self._specs: Counter[Hashable] = Counter()
        self._peers: dict[GroupPath, Prior] = {}
        self._noise = CAUTIOUS_NOISE
        self._noises: dict[Spec, float] = {}
        self._resize_s, self._reshard_s = RESIZE_S, RESHARD * RESIZE_S
        self._switches = _Switches()
        self._joins: dict[Spec, float] = {}
        self._learned: dict[int, _Learned] = {}
        self._factors = KindFactors(gpu_speeds or {})
        self._most = 0
        self._scripts: dict[tuple[str, str], Spec] = {}

    def finished(self, histories: Sequence[JobHistory]) -> None:
        """Learn from the jobs that ended by themselves, newest first; free when they are the same as before."""
        if histories is self._finished:
            return
        self._finished = histories
        self._learn_scripts(reversed(histories))
        self._progress = BetaProgress([log_of(history) for history in reversed(histories)], seed=self._seed)
        self._learn_step_times(histories)
        self._learn_noise(histories)
        pauses = [history.pause_s for history in histories if history.pause_s is not None]
        self._resize_s = statistics.median(pauses) if pauses else RESIZE_S
        resharded = [h.pause_s for h in histories if h.pause_s is not None and reshards(h.spec)]
        self._reshard_s = statistics.median(resharded) if resharded else RESHARD * self._resize_s
        self._learn_switches(histories)

    def _learn_scripts(self, histories: Iterable[JobHistory]) -> None:
        for history in histories:
            if history.spec is not None:
                key = script(history.job.user, history.job.name)
                self._scripts.pop(key, None)
                self._scripts[key] = history.spec
        # Users choose the names.
        _keep(self._scripts, SCRIPTS)

    def _learn_step_times(self, histories: Sequence[JobHistory]) -> None:
        new = [history for history in histories if id(history) not in self._past]
        # A job that tells its bytes is heard a second time, without them: of one that has not run yet, and so has told
        # nothing, is expected what jobs do.
        told = [[one for one in (history, without_bytes(history)) if one is not None] for history in new]
        jobs = [(*points_in(one), WIRED if is_wired(one.spec) else CAUTIOUS) for both in told for one in both]
        fits = iter(fit_all(jobs))
        self._past |= {id(both[0]): [(one, next(fits)) for one in both] for both in told}
        # Those that are kept hold their history, so that no other object gets its identity.
        self._past = {key: self._past[key] for key in map(id, histories)}
        measured = [both[0] for both in self._past.values() if len(both[0][1].misfit)]
        self._factors.learn([self._told(history, fit) for history, fit in measured])
        # Figures of all are told for one kind of GPU.
        heard: dict[bool, list[tuple[JobHistory, Fit]]] = {False: [], True: []}
        for history, _ in measured:
            factor = self._factor_of(history, back=True)
            for one, fit in self._past[id(history)]:
                heard[is_wired(one.spec)].append((one, fit_on(fit, factor, layout_of(one.spec))))
        self._trees = {
            wired: Tree([(kin_of(h), JobEvidence.of(fit)) for h, fit in some], WIRED if wired else CAUTIOUS)
            for wired, some in heard.items()
        }
        self._widths = {
            wired: found_widths([(kin_of(h), fit) for h, fit in some], WIRED if wired else CAUTIOUS)
            for wired, some in heard.items()
        }
        self._own = Counter((kin_of(history).spec, history.job.user) for history, _ in measured)
        self._specs = Counter(kin_of(history).spec for history, _ in measured)
        self._peers, self._priors = {}, {}
        for known in self._learned.values():
            known.on.clear()

    def _told(self, history: JobHistory, fit: Fit) -> KindEvidence:
        """What a finished job tells of kinds of GPU."""
        here = base_kind(history.throughput)
        found = ratios(history.throughput, fit, layout_of(history.spec), here)
        return KindEvidence(kin_of(history).spec, history.job.user, here, fit, found)

    def _factor_of(self, history: JobHistory, *, back: bool = False) -> Factor:
        """From the kind that all figures are told for to that which the job's are fitted on, or back."""
        here, kin = base_kind(history.throughput) or self._factors.reference, kin_of(history)
        ends = (self._factors.reference, here)
        return self._factors.factor(kin.spec, *(reversed(ends) if back else ends))

    def _learn_switches(self, histories: Sequence[JobHistory]) -> None:
        """Joining takes as long as the state is large, so that of jobs of one spec counts before that of all."""
        joins: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            cost = join_of(history)
            if history.spec is not None and cost is not None:
                joins[plain_spec(history.spec)].append(cost)
        moved = [history for history in histories if not by_terms(history.spec)]
        leaves = [leave for history in moved if (leave := leave_of(history)) is not None]
        readies = [ready for history in histories if (ready := ready_of(history)) is not None]
        self._joins = {spec: statistics.median(found) for spec, found in joins.items()}
        hot = [cost for spec, cost in self._joins.items() if not by_terms(spec)]
        terms = [cost for spec, cost in self._joins.items() if by_terms(spec)]
        self._switches = _Switches(
            statistics.median(hot) if hot else JOIN_S,
            statistics.median(leaves) if leaves else LEAVE_S,
            statistics.median(readies) if readies else READY_S,
            statistics.median(terms) if terms else TERM_S,
        )

    def _learn_noise(self, histories: Sequence[JobHistory]) -> None:
        kin: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            ratio = own_noise(history)
            if history.spec is not None and ratio is not None:
                kin[plain_spec(history.spec)].append(ratio)
        every = [ratio for ratios in kin.values() for ratio in ratios]
        self._noise = statistics.median(every) if every else CAUTIOUS_NOISE
        self._noises = {spec: statistics.median(ratios) for spec, ratios in kin.items()}

    def look(self, histories: Iterable[JobHistory]) -> None:
        """Bring the models of these jobs up to date, all in one fit; free for those with nothing new."""
        histories = list(histories)
        self._learn_scripts(histories)
        self._fit(map(self._as_told, histories))
        self._most = max(self._most, len(histories))
        # What is expected is found again when it is asked for; no job may ever end that would make all of it anew.
        for known in (self._learned, self._priors, self._peers):
            _keep(known, self._most + SPARE)

    def _fit(self, histories: Iterable[JobHistory]) -> None:
        stale = [history for history in histories if not self._current(history)]
        priors = [self._prior_of(history) for history in stale]
        jobs = [(*points_in(history), prior) for history, prior in zip(stale, priors, strict=True)]
        for history, prior, fit in zip(stale, priors, fit_all(jobs), strict=True):
            self._learned.pop(history.job.job_id, None)
            model = MeasuredThroughput(
                fit, layout_of(history.spec), self._peers_of(history), self._widths[is_wired(history.spec)]
            )
            self._learned[history.job.job_id] = _Learned(history, prior, model)

    def _current(self, history: JobHistory) -> bool:
        known = self._learned.get(history.job.job_id)
        if known is None or known.prior is not self._prior_of(history):
            return False
        return known.history is history or (
            known.history.throughput == history.throughput and known.history.spec == history.spec
        )

    def _peers_of(self, history: JobHistory) -> Prior | None:
        """What other users' jobs of its spec make plausible of a job, on the kind of GPU that it is fitted on; None
        where there are too few."""
        kin = kin_of(history)
        if kin.spec is None or self._specs[kin.spec] - self._own[kin.spec, kin.user] < PEERS:
            return None
        if kin not in self._peers:
            self._peers[kin] = self._trees[is_wired(history.spec)].expect(kin, others=True)
        return prior_on(self._peers[kin], self._factor_of(history), layout_of(history.spec))

    def _prior_of(self, history: JobHistory) -> Prior:
        """What is expected of a job before it measures, on the kind of GPU that it is fitted on."""
        kin, wired = kin_of(history), is_wired(history.spec)
        key = wired, kin, base_kind(history.throughput)
        if key not in self._priors:
            expected = self._trees[wired].expect(kin)
            self._priors[key] = prior_on(expected, self._factor_of(history), layout_of(history.spec))
        return self._priors[key]

    def about(
        self, history: JobHistory | None, now: float = 0.0, *, blocks: bool = False, kinds: Sequence[str] = ()
    ) -> JobModel:
        """What is known of a job, one of `blocks` or not, and of what it is on `kinds` of GPU; of one without a
        history, what is typical.

        `now` is Slurm's clock: who has been silent for long is thought to need as long again (Lindy's law), whatever
        little was left by its last report.
        """
        if history is None:
            nothing = self._progress.progress(TrainingState(dataset=0, epochs=0.0))
            typical = MeasuredThroughput.of((), self._trees[False].expect(NOWHERE))
            known = JobModel(None, typical, NoiseEfficiency(1.0, self._noise), nothing, 0.0, (), self._resize_s)
            known = replace(known, on=on_kinds(typical, self._factors.reference, kinds, self._factors, None, ()))
            return self._hot(known, None) if blocks else known
        history = self._as_told(history)
        self._fit([history])
        declared = float(history.spec.epochs) if history.spec is not None else 0.0
        epochs, efficiency = epochs_in(history), self._efficiency(history)
        progress = self._progress.progress(training_after(history, epochs, len(history.epochs)), declared)
        known = JobModel(
            history.spec,
            self._learned[history.job.job_id].model,
            efficiency,
            at_least(progress, unheard_epochs(history, efficiency, now)),
            progress_in(history),
            tuple((float(point.epoch + 1), point.loss) for point in history.epochs if point.loss is not None),
            history.pause_s if history.pause_s is not None else self._typical_pause_s(history.spec),
            dataset_of(history),
        )
        known = replace(known, on=self._on(history, kinds)) if kinds else known
        return self._hot(known, history) if blocks else known

    def _on(self, history: JobHistory, kinds: Sequence[str]) -> Mapping[str, ThroughputModel]:
        known = self._learned[history.job.job_id]
        if not known.on.keys() >= {*kinds}:
            fit, layout = known.model.fit, layout_of(history.spec)
            here = base_kind(history.throughput)
            own = ratios(history.throughput, fit, layout, here)
            here, spec = here or self._factors.reference, kin_of(history).spec
            known.on.update(on_kinds(known.model, here, kinds, self._factors, spec, own))
        return {kind: known.on[kind] for kind in kinds}

    def _typical_pause_s(self, spec: Spec | None) -> float:
        return self._reshard_s if reshards(spec) else self._resize_s

    def _hot(self, known: JobModel, history: JobHistory | None) -> JobModel:
        """The same of a job of blocks: its own changes tell what one costs, then those of jobs of its spec."""
        typical = self._switches
        if history is None:
            return replace(known, resize_s=typical.join_s, shrink_s=typical.leave_s, prepare_s=typical.ready_s)
        anew, leave, ready = by_terms(history.spec), leave_of(history), ready_of(history)
        join_s, ready_s = self._join_s(history), ready if ready is not None else typical.ready_s
        known = replace(known, resize_s=join_s, prepare_s=ready_s)
        return known if anew else replace(known, shrink_s=leave if leave is not None else typical.leave_s)

    def switch_s(self, history: JobHistory | None) -> float:
        """Seconds that a change is expected to interrupt a job of blocks: as its own did, or those of jobs like it in
        which blocks joined."""
        if history is not None and history.switch_s is not None:
            return history.switch_s
        return self._switches.join_s if history is None else self._join_s(self._as_told(history))

    def _join_s(self, history: JobHistory) -> float:
        """The same where blocks join."""
        anew, own = by_terms(history.spec), join_of(history)
        if own is not None:
            return own
        kin = self._joins.get(plain_spec(history.spec)) if history.spec is not None else None
        return kin if kin is not None else self._switches.term_s if anew else self._switches.join_s

    def _as_told(self, history: JobHistory) -> JobHistory:
        """The history with the spec that is expected of the job, where it has told none."""
        expected = self._scripts.get(script(history.job.user, history.job.name)) if history.spec is None else None
        return history if expected is None else replace(history, spec=expected)

    def _efficiency(self, history: JobHistory) -> NoiseEfficiency:
        if history.spec is None:
            return NoiseEfficiency(1.0, math.inf)  # without a base batch there is nothing to be worth less than
        kin = self._noise if inexact(history.spec) else self._noises.get(plain_spec(history.spec), self._noise)
        ratio = own_noise(history) or kin
        return NoiseEfficiency(history.spec.base_batch, ratio * max(history.spec.base_batch, 1))


def _keep(known: dict[Any, Any], most: int) -> None:
    """Those that were added last, so many of them."""
    while len(known) > most:
        del known[next(iter(known))]
