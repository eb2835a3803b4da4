"""What a store remembers is bounded by what it is asked for, however long it lives."""

from __future__ import annotations

from ones_db.history_cache import SPARE, HistoryCache


def test_jobs_that_went_are_forgotten() -> None:
    """Protects a companion that lives for months; and jobs asked for in turns, tick by tick, from being read anew."""
    cache = HistoryCache()
    finished = list(range(1_000_000, 1_000_200))
    for first in range(0, 20 * SPARE, 10):
        live = list(range(first, first + 50))
        kept = cache.of(live)
        cache.of(finished)
        now = cache.of(live)
        assert all(now[key] is kept[key] for key in live)
        assert len(cache._jobs) <= len(finished) + SPARE
    assert 0 not in cache._jobs


def test_a_large_site_is_remembered_whole() -> None:
    cache = HistoryCache()
    live, finished = list(range(5000)), list(range(10_000, 10_200))
    kept = cache.of(live)
    cache.of(finished)
    now = cache.of(live)
    assert all(now[key] is kept[key] for key in live)
