"""The pure scheduler: budgets kept, the grid kept, nobody starves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.scheduler import (
    CONCESSION_S,
    GRID,
    Chunk,
    Job,
    Limits,
    Stage,
    chunk_end,
    decide,
    positions,
    victim,
)

LIMITS = Limits(chunk=512, max_live=4, row_s=0.01)
settings.register_profile("worker", deadline=None)
settings.load_profile("worker")

jobs = st.builds(
    Job,
    id=st.uuids().map(str),
    stage=st.sampled_from(Stage),
    arrival=st.floats(0, 1000),
    total=st.integers(2, 5000),
    rows=st.just(0),
    priority=st.sampled_from(["interactive", "background"]),
)


@given(st.integers(0, 3000), st.integers(1, 3000), st.sampled_from([64, 128, 512, 2048]))
def test_chunks_are_cut_on_the_grid_and_the_last_row_goes_alone(start: int, more: int, size: int) -> None:
    total = start + more
    end = chunk_end(start, total, size)
    assert start < end <= total
    assert end == total if start == total - 1 else end <= total - 1
    assert end % GRID == 0 or end >= total - 1
    assert end - start <= size + GRID
    if end < total - 1:
        assert end - start >= GRID or start % GRID == 0


@given(st.integers(2, 5000), st.sampled_from([64, 512]))
def test_a_resumed_prefill_is_cut_as_a_cold_one(total: int, size: int) -> None:
    borders, at = [], 0
    while at < total:
        at = chunk_end(at, total, size)
        borders.append(at)
    assert borders[-1] == total
    for border in borders[:-1]:
        assert chunk_end(border, total, size) == borders[borders.index(border) + 1]


@given(st.lists(jobs, max_size=20, unique_by=lambda job: job.id))
def test_a_decision_keeps_its_budgets(given: list[Job]) -> None:
    decision = decide(given, LIMITS)
    by_id = {job.id: job for job in given}
    live = sum(job.stage is not Stage.WAITING for job in given)
    assert len(decision.admit) <= max(LIMITS.max_live - live, 0)
    assert set(decision.decode) == {job.id for job in given if job.stage is Stage.DECODING}
    assert all(by_id[id].stage is Stage.WAITING for id in decision.admit)
    if decision.prefill is not None:
        assert by_id[decision.prefill.id].stage is Stage.PREFILLING
        rows = decision.prefill.end - decision.prefill.start
        assert rows <= (GRID if decision.decode else LIMITS.chunk)
    else:
        assert not any(job.stage is Stage.PREFILLING for job in given)


@given(st.integers(1, 40), st.floats(0.01, 2))
def test_a_background_request_is_not_starved_by_a_stream_of_short_ones(total_chunks: int, every: float) -> None:
    """New interactive one-chunk prompts arrive for ever; the old long one still gets its turn."""
    old = Job("old", Stage.PREFILLING, 0.0, total_chunks * 64 + 1, 0, "background")
    limits = replace(LIMITS, row_s=0.001)
    now, turns = 0.0, 0
    while old.rows < old.total - 1:
        fresh = Job(f"new{turns}", Stage.PREFILLING, now, 65)
        chunk = decide([old, fresh], replace(limits, chunk=64)).prefill
        assert chunk is not None
        if chunk.id == "old":
            old = replace(old, rows=chunk.end)
        now += every
        turns += 1
        bound = CONCESSION_S["background"] + old.total * limits.row_s + 1
        assert now <= bound + (total_chunks + 1) * every


def test_a_short_question_passes_a_long_prompt_that_came_before() -> None:
    long = Job("long", Stage.PREFILLING, 0.0, 4000, 512)
    short = Job("short", Stage.PREFILLING, 1.0, 20)
    assert decide([long, short], LIMITS).prefill == Chunk("short", 0, 19)


def test_interactive_goes_before_background() -> None:
    waiting = [Job("b", Stage.WAITING, 0.0, 10, priority="background"), Job("i", Stage.WAITING, 5.0, 10)]
    assert decide(waiting, LIMITS).admit == ("i", "b")
    assert positions(waiting, LIMITS) == {"i": 0, "b": 1}


def test_who_waits_for_another_s_prefill_is_not_admitted_until_it_left() -> None:
    first = Job("a", Stage.PREFILLING, 0.0, 1000, 64)
    second = Job("b", Stage.WAITING, 0.0, 1000, after="a")
    assert decide([first, second], LIMITS).admit == ()
    assert decide([second], LIMITS).admit == ("b",)


def test_chunks_shrink_while_a_stream_decodes() -> None:
    long = Job("long", Stage.PREFILLING, 0.0, 4000, 512)
    stream = Job("stream", Stage.DECODING, 0.0, 50, 49)
    assert decide([long], LIMITS).prefill == Chunk("long", 512, 1024)
    assert decide([long, stream], LIMITS).prefill == Chunk("long", 512, 576)


@given(st.integers(0, 100), st.floats(1e-6, 0.1), st.floats(0, 1e-5), st.sampled_from([64, 192, 512, 2048]))
def test_beside_a_stream_a_chunk_has_the_rows_that_its_time_allows(
    blocks: int, base: float, slope: float, chunk: int
) -> None:
    limits = replace(LIMITS, chunk=chunk)
    long = Job("long", Stage.PREFILLING, 0.0, 1_000_000, blocks * chunk)
    stream = Job("stream", Stage.DECODING, 0.0, 50, 49)

    def seconds(start: int, end: int) -> float:
        return (end - start) * (base + slope * (start + end) / 2)

    found = decide([long, stream], limits, seconds).prefill
    assert found is not None and found.start % GRID == found.end % GRID == 0
    rows = found.end - found.start
    assert rows == GRID or seconds(found.start, found.end) <= limits.beside_s
    double = min(2 * rows + GRID, chunk)
    assert rows == chunk or seconds(found.start, found.start + double) > limits.beside_s


def test_the_last_in_order_gives_way_when_the_pool_is_full() -> None:
    first = Job("first", Stage.DECODING, 0.0, 100, 99)
    last = Job("last", Stage.DECODING, 9.0, 100, 99)
    assert victim([first, last], "first", LIMITS) == "last"
    assert victim([first, last], "last", LIMITS) == "last"
    assert victim([first], "first", LIMITS) is None


def test_a_prefill_stops_where_rows_are_on_their_way_from_the_store() -> None:
    job = Job("a", Stage.PREFILLING, 0.0, total=4000, rows=640, border=1000)
    assert decide([job], LIMITS).prefill == Chunk("a", 640, 1000)
    assert decide([replace(job, border=2048)], LIMITS).prefill == Chunk("a", 640, 1024)


def test_who_is_being_read_for_is_not_preempted() -> None:
    first = Job("first", Stage.DECODING, 0.0, total=10)
    second = Job("second", Stage.DECODING, 1.0, total=10)
    last = Job("last", Stage.PREFILLING, 2.0, total=1000, border=512)
    assert victim([first, second, last], "first", LIMITS) == "second"
    assert victim([first, last], "first", LIMITS) == "first"
