"""Learner: from job histories to the models that policies use."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ones_db import JobHistory
from ones_wrapper.protocol import Spec
from slurm_ones.learn.hierarchy import (
    Factor,
    GroupPath,
    JobEvidence,
    KindEvidence,
    KindFactors,
    Tree,
    faster,
    found_widths,
    on_kinds,
    prior_on,
)
from slurm_ones.learn.histories import CAUTIOUS as CAUTIOUS_NOISE
from slurm_ones.learn.histories import (
    NoiseEfficiency,
    base_kind,
    by_terms,
    dataset_of,
    epochs_in,
    free_batch,
    group_of,
    inexact,
    is_wired,
    join_of,
    leave_of,
    log_of,
    own_noise,
    plain_spec,
    points_in,
    progress_in,
    ratios,
    ready_of,
    reshards,
    training_after,
    unreported_epochs,
    without_bytes,
)
from slurm_ones.learn.progress import BetaProgress, TrainingState, at_least
from slurm_ones.learn.step_time import CAUTIOUS, WIRED, Fit, Prior, fit_all, layout_of
from slurm_ones.learn.throughput import MeasuredThroughput, moved
from slurm_ones.learn.workload import script
from slurm_ones.policy.contract import EfficiencyModel, Progress, ThroughputModel

NOWHERE = GroupPath(None, None, "")
"""Place in the tree of a job that has reported nothing."""
AROUND = {False: CAUTIOUS, True: WIRED}
"""Prior before any measurement, by whether the bytes that a job's ranks send are known."""
PEERS = 3
"""Fewest finished jobs of other users with the same spec from which an upper bound on a job's speed is derived."""
RESIZE_S = 30.0
"""Expected pause of training at a resize, in seconds, before any resize was measured."""
RESHARD = 2.0
"""Factor on the expected pause if the checkpoint must be resharded, until such a resize is measured."""
JOIN_S, LEAVE_S, READY_S = 0.5, 0.05, 8.0
"""Seconds before any are measured: pause when blocks join, pause when blocks leave, time until a started block can
join. They are from small models (docs/benchmarks/resizes.md)."""
TERM_S = 5.0
"""Guessed pause, in seconds, of a change that restarts training from a checkpoint, before one is measured."""
SPARE = 100
"""Number of running jobs' models kept in addition to the most that one tick has needed."""
SCRIPTS = 10_000
"""Largest number of scripts (pairs of user and job name) whose newest spec is kept."""


@dataclass(frozen=True)
class JobModel:
    """Learned models of one job, with its spec."""

    spec: Spec | None
    """Spec that the job reported, or else the newest spec of the same script; None if there is neither."""
    throughput: ThroughputModel
    efficiency: EfficiencyModel
    progress: Progress
    samples: float
    """Progress over all runs, in samples of the base batch."""
    losses: tuple[tuple[float, float], ...]
    """Pairs (epochs done, loss), one for each epoch with a reported loss."""
    resize_s: float
    """Expected pause of training at a resize, in seconds."""
    dataset: int = 0
    """Number of samples in an epoch, reported or measured; 0 if unknown."""
    shrink_s: float | None = None
    """Expected pause of training when the job gives up GPUs, in seconds; None if it equals `resize_s`."""
    prepare_s: float = 0.0
    """Expected time, in seconds, from a block's start until it joins."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model on each requested kind of GPU."""


@dataclass(frozen=True)
class _Switches:
    """Typical seconds: pauses when blocks join or leave, preparation of new blocks, and pauses with a new term."""

    join_s: float = JOIN_S
    leave_s: float = LEAVE_S
    ready_s: float = READY_S
    term_s: float = TERM_S


@dataclass(frozen=True)
class _Learned:
    """Throughput model of a job, with the history and the prior from which it was fitted."""

    history: JobHistory
    prior: Prior
    model: MeasuredThroughput
    on: dict[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model on each kind of GPU requested so far."""


class Learner:
    """Learner of models from job histories.

    A finished job's models are fitted once, a running job's whenever it has reported something new. Jobs with the same
    spec (base batch, local batch, dataset, epochs) count as jobs of one script. A job that has not run yet gets the
    newest spec among jobs of the same user and name, without numbers at the name's end.

    A job's prior comes from its owner's jobs of the same spec. It is shrunk towards other users' jobs of the spec, then
    towards the family and the site (`hierarchy`).
    """

    def __init__(self, *, seed: int = 0, gpu_speeds: Mapping[str, float] | None = None) -> None:
        """Create a learner. `gpu_speeds` are the site's guesses of the relative speeds of its kinds of GPU."""
        self._seed = seed
        self._finished: Sequence[JobHistory] = ()
        self._past: dict[int, list[tuple[JobHistory, Fit]]] = {}
        """Fits of each finished job, with and (if reported) without its gradients' size, by `id` of its history."""
        self._progress = BetaProgress(seed=seed)
        self._trees = {wired: Tree((), around) for wired, around in AROUND.items()}
        self._widths = dict.fromkeys(AROUND, (1.0, 1.0))
        self._priors: dict[tuple[bool, GroupPath, str], Prior] = {}
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
        """Learn from all finished jobs, newest first. Do nothing if `histories` is the last call's object."""
        if histories is self._finished:
            return
        self._finished = histories
        self._learn_scripts(reversed(histories))
        self._progress = BetaProgress([log_of(history) for history in reversed(histories)], seed=self._seed)
        self._learn_step_times(histories)
        self._learn_noise(histories)
        paused = [(history, history.pause_s) for history in histories if history.pause_s is not None]
        self._resize_s = _median((pause for _, pause in paused), RESIZE_S)
        self._reshard_s = _median((pause for h, pause in paused if reshards(h.spec)), RESHARD * self._resize_s)
        self._learn_switches(histories)

    def _learn_scripts(self, histories: Iterable[JobHistory]) -> None:
        for history in histories:
            if history.spec is not None:
                key = script(history.job.user, history.job.name)
                self._scripts.pop(key, None)
                self._scripts[key] = history.spec
        # Users choose the names, so their number must be bounded.
        _keep(self._scripts, SCRIPTS)

    def _learn_step_times(self, histories: Sequence[JobHistory]) -> None:
        new = [history for history in histories if id(history) not in self._past]
        # A job that reports its bytes is fitted a second time without them, as evidence for jobs that have not run yet.
        variants = [[one for one in (history, without_bytes(history)) if one is not None] for history in new]
        fits = iter(fit_all([(*points_in(one), AROUND[is_wired(one.spec)]) for both in variants for one in both]))
        self._past |= {id(both[0]): [(one, next(fits)) for one in both] for both in variants}
        # `_past` holds the histories that it keeps, so no other object can get the same id.
        self._past = {key: self._past[key] for key in map(id, histories)}
        measured = [both[0] for both in self._past.values() if len(both[0][1].misfit)]
        self._factors.learn([_kinds_of(history, fit) for history, fit in measured])
        # The parameters of all jobs are expressed for one kind of GPU.
        jobs: dict[bool, list[tuple[GroupPath, Fit]]] = {False: [], True: []}
        for history, _ in measured:
            by = self._factor_of(history, back=True).mean  # the uncertainty of the factor is left out
            for one, fit in self._past[id(history)]:
                on_reference = moved(fit, by * faster(layout_of(one.spec))) if by else fit
                jobs[is_wired(one.spec)].append((group_of(one), on_reference))
        for wired, around in AROUND.items():
            self._trees[wired] = Tree([(path, JobEvidence.of(fit)) for path, fit in jobs[wired]], around)
            self._widths[wired] = found_widths(jobs[wired], around)
        paths = [group_of(history) for history, _ in measured]
        self._own, self._specs = Counter((path.spec, path.user) for path in paths), Counter(path.spec for path in paths)
        self._peers, self._priors = {}, {}
        for known in self._learned.values():
            known.on.clear()

    def _factor_of(self, history: JobHistory, *, back: bool = False) -> Factor:
        """Return the speed factor from the reference kind of GPU to the job's base kind; with `back`, the inverse."""
        ends = self._factors.reference, base_kind(history.throughput) or self._factors.reference
        return self._factors.factor(group_of(history).spec, *(reversed(ends) if back else ends))

    def _learn_switches(self, histories: Sequence[JobHistory]) -> None:
        """Learn the typical pauses when blocks join or leave; for joins also by spec, since they depend on the model's
        size."""
        joins: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            if history.spec is not None and (cost := join_of(history)) is not None:
                joins[plain_spec(history.spec)].append(cost)
        self._joins = {spec: statistics.median(found) for spec, found in joins.items()}
        self._switches = _Switches(
            _median((cost for spec, cost in self._joins.items() if not by_terms(spec)), JOIN_S),
            _median((leave_of(history) for history in histories if not by_terms(history.spec)), LEAVE_S),
            _median(map(ready_of, histories), READY_S),
            _median((cost for spec, cost in self._joins.items() if by_terms(spec)), TERM_S),
        )

    def _learn_noise(self, histories: Sequence[JobHistory]) -> None:
        found: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            ratio = own_noise(history)
            if history.spec is not None and ratio is not None:
                found[plain_spec(history.spec)].append(ratio)
        self._noise = _median((ratio for some in found.values() for ratio in some), CAUTIOUS_NOISE)
        self._noises = {spec: statistics.median(some) for spec, some in found.items()}

    def look(self, histories: Iterable[JobHistory]) -> None:
        """Update these running jobs' models from their new reports."""
        histories = list(histories)
        self._learn_scripts(histories)
        self._fit(map(self._with_spec, histories))
        self._most = max(self._most, len(histories))
        # A prior that was dropped is computed again when it is needed. Without this bound the caches would grow until a
        # job finishes.
        for known in (self._learned, self._priors, self._peers):
            _keep(known, self._most + SPARE)

    def _fit(self, histories: Iterable[JobHistory]) -> None:
        stale = [history for history in histories if not self._current(history)]
        priors = [self._prior_of(history) for history in stale]
        fits = fit_all([(*points_in(history), prior) for history, prior in zip(stale, priors, strict=True)])
        for history, prior, fit in zip(stale, priors, fits, strict=True):
            self._learned.pop(history.job.job_id, None)
            widths = self._widths[is_wired(history.spec)]
            model = MeasuredThroughput(fit, layout_of(history.spec), self._peers_of(history), widths)
            self._learned[history.job.job_id] = _Learned(history, prior, model)

    def _current(self, history: JobHistory) -> bool:
        known = self._learned.get(history.job.job_id)
        if known is None or known.prior is not self._prior_of(history):
            return False
        before = known.history
        return before is history or (before.throughput == history.throughput and before.spec == history.spec)

    def _peers_of(self, history: JobHistory) -> Prior | None:
        """Return the prior from other users' jobs of this spec on the job's base kind of GPU; None with fewer than
        `PEERS`."""
        path = group_of(history)
        if path.spec is None or self._specs[path.spec] - self._own[path.spec, path.user] < PEERS:
            return None
        if path not in self._peers:
            self._peers[path] = self._trees[is_wired(history.spec)].expect(path, others=True)
        return prior_on(self._peers[path], self._factor_of(history), layout_of(history.spec))

    def _prior_of(self, history: JobHistory) -> Prior:
        path, wired = group_of(history), is_wired(history.spec)
        key = wired, path, base_kind(history.throughput)
        if key not in self._priors:
            expected = self._trees[wired].expect(path)
            self._priors[key] = prior_on(expected, self._factor_of(history), layout_of(history.spec))
        return self._priors[key]

    def about(
        self, history: JobHistory | None, now: float = 0.0, *, blocks: bool = False, kinds: Sequence[str] = ()
    ) -> JobModel:
        """Return a job's models, with throughput on each of these `kinds` of GPU; without a history, a typical job's
        models.

        `blocks` is True for a job whose blocks can join and leave. `now` is Slurm's clock. A job that has been silent
        for long is expected to need at least as long again (Lindy's law).
        """
        if history is None:
            nothing = self._progress.progress(TrainingState(dataset=0, epochs=0.0))
            typical = MeasuredThroughput.of((), self._trees[False].expect(NOWHERE))
            on = on_kinds(typical, self._factors.reference, kinds, self._factors, None, ())
            known = JobModel(None, typical, NoiseEfficiency(1.0, self._noise), nothing, 0.0, (), self._resize_s, on=on)
            return self._of_blocks(known, None) if blocks else known
        history = self._with_spec(history)
        self._fit([history])
        declared = float(history.spec.epochs) if history.spec is not None else 0.0
        efficiency = self._efficiency(history)
        training = training_after(history, epochs_in(history), len(history.epochs))
        progress = self._progress.progress(training, declared)
        usual_s = self._reshard_s if reshards(history.spec) else self._resize_s
        known = JobModel(
            spec=history.spec,
            throughput=self._learned[history.job.job_id].model,
            efficiency=efficiency,
            progress=at_least(progress, unreported_epochs(history, efficiency, now)),
            samples=progress_in(history),
            losses=tuple((float(point.epoch + 1), point.loss) for point in history.epochs if point.loss is not None),
            resize_s=usual_s if history.pause_s is None else history.pause_s,
            dataset=dataset_of(history),
            on=self._on(history, kinds) if kinds else {},
        )
        return self._of_blocks(known, history) if blocks else known

    def _on(self, history: JobHistory, kinds: Sequence[str]) -> Mapping[str, ThroughputModel]:
        known = self._learned[history.job.job_id]
        if not known.on.keys() >= {*kinds}:
            here = base_kind(history.throughput)
            own = ratios(history.throughput, known.model.fit, layout_of(history.spec), here)
            here, spec = here or self._factors.reference, group_of(history).spec
            known.on.update(on_kinds(known.model, here, kinds, self._factors, spec, own))
        return {kind: known.on[kind] for kind in kinds}

    def _of_blocks(self, known: JobModel, history: JobHistory | None) -> JobModel:
        """Return the models with the pauses of changes of blocks, the job's own or else typical ones."""
        typical = self._switches
        if history is None:
            return replace(known, resize_s=typical.join_s, shrink_s=typical.leave_s, prepare_s=typical.ready_s)
        shrink_s = None if by_terms(history.spec) else _first(leave_of(history), typical.leave_s)
        prepare_s = _first(ready_of(history), typical.ready_s)
        return replace(known, resize_s=self._join_s(history), shrink_s=shrink_s, prepare_s=prepare_s)

    def switch_s(self, history: JobHistory | None) -> float:
        """Return the expected pause, in seconds, when blocks join or leave: the job's own, or else that of joins in
        jobs of its spec."""
        if history is not None and history.switch_s is not None:
            return history.switch_s
        return self._switches.join_s if history is None else self._join_s(self._with_spec(history))

    def _join_s(self, history: JobHistory) -> float:
        of_spec = self._joins.get(plain_spec(history.spec)) if history.spec is not None else None
        typical = self._switches.term_s if by_terms(history.spec) else self._switches.join_s
        return _first(join_of(history), _first(of_spec, typical))

    def _with_spec(self, history: JobHistory) -> JobHistory:
        expected = self._scripts.get(script(history.job.user, history.job.name)) if history.spec is None else None
        return history if expected is None else replace(history, spec=expected)

    def _efficiency(self, history: JobHistory) -> NoiseEfficiency:
        if history.spec is None:
            return NoiseEfficiency(1.0, math.inf)  # without a base batch no batch is less efficient
        typical = self._noise if inexact(history.spec) else self._noises.get(plain_spec(history.spec), self._noise)
        ratio = own_noise(history) or typical
        return NoiseEfficiency(history.spec.base_batch, ratio * max(history.spec.base_batch, 1), free_batch(history))


def _kinds_of(history: JobHistory, fit: Fit) -> KindEvidence:
    here, path = base_kind(history.throughput), group_of(history)
    found = ratios(history.throughput, fit, layout_of(history.spec), here)
    return KindEvidence(path.spec, path.user, here, fit, found)


def _median(values: Iterable[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else default


def _first(value: float | None, default: float) -> float:
    return value if value is not None else default


def _keep(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
