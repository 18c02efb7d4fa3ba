"""The daemon under fire: fronts and workers killed at random moments of real requests, on a tiny random model.

After every kill the worker is gone, the next start serves, texts are those of the first time, and what `done` called
stored is not computed again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

import psutil

from kvclient import Client, Completion, KvdError, WorkerLost
from kvd.models.record import Record, write_record
from rig.daemon import Daemon, short_home
from tests.tiny import WORDS, tiny_model
from torments.oracle import Outcome

KILLS, QUICK_KILLS = 50, 2
ORPHAN_S = 1.0
ANSWER_TOKENS = 24
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Known:
    """What the daemon has answered and called stored."""

    text: str
    stored: int


def run(quick: bool) -> Outcome:
    outcome = Outcome("daemon")
    dice = random.Random(40)
    with short_home() as home:
        folder = tiny_model(home / "models" / MODEL)
        write_record(folder, Record(MODEL, "torture", time.time()))
        daemon = Daemon(home, "--memory-limit", "2GiB", "--cache-block-size", "64")
        known: dict[str, Known] = {}
        try:
            daemon.start()
            for turn in range(QUICK_KILLS if quick else KILLS):
                with outcome.run(f"kill {turn}"):
                    _turn(daemon, outcome, dice, known, front=turn % 2 == 0)
        finally:
            daemon.stop()
        if left := [*(home / "run" / "workers").iterdir(), *(home / "tmp").iterdir()]:
            outcome.leaks += 1
            outcome.fail(f"left behind: {', '.join(path.name for path in left)}")
    return outcome


def _turn(daemon: Daemon, outcome: Outcome, dice: random.Random, known: dict[str, Known], *, front: bool) -> None:
    """Ask something old and something new, then kill in the middle of another request."""
    with daemon.client() as client:
        if known:
            _check(outcome, dice.choice(sorted(known)), known, client)
        prompt = _prompt(dice)
        done = client.generate(MODEL, prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, durable_wait_ms=5000)
        known[prompt] = Known(done.text, done.stats.stored_tokens)
        outcome.acknowledged += done.stats.stored_tokens
    victim = daemon.worker_pids()[0]
    ends: list[Completion | KvdError] = []
    asking = threading.Thread(target=_ask, args=(daemon, _prompt(dice), ends))
    asking.start()
    time.sleep(dice.random() * 0.4)
    if front:
        assert daemon.process is not None
        daemon.kill_pids([daemon.process.pid])
        daemon.process.wait()
        _gone(outcome, victim)
        daemon.start()
    else:
        os.kill(victim, signal.SIGKILL)
    asking.join(10)
    if asking.is_alive():
        outcome.hangs += 1
        outcome.fail("a client was not told that its worker is dead")
    elif not front and not isinstance(ends[0], Completion | WorkerLost):
        outcome.fail(f"a killed worker's client got {type(ends[0]).__name__}: {ends[0]}")


def _check(outcome: Outcome, prompt: str, known: dict[str, Known], client: Client) -> None:
    """An old prompt: the same text, and no stored token computed again."""
    before = known[prompt]
    done = client.generate(MODEL, prompt, max_tokens=ANSWER_TOKENS, temperature=0.0)
    outcome.counts["repeats"] += 1
    if done.text != before.text:
        outcome.wrong_bytes += 1
        outcome.fail(f"{prompt[:20]!r}…: another text than before")
    most = max(1, done.stats.prompt_tokens - before.stored)
    if done.stats.computed_tokens > most:
        outcome.lost += 1
        outcome.fail(f"{prompt[:20]!r}…: {done.stats.computed_tokens} tokens computed, {most} were not stored")


def _ask(daemon: Daemon, prompt: str, ends: list[Completion | KvdError]) -> None:
    with contextlib.closing(daemon.client()) as client:
        try:
            ends.append(client.generate(MODEL, prompt, max_tokens=200, temperature=0.0, timeout=8.0))
        except KvdError as problem:
            ends.append(problem)


def _gone(outcome: Outcome, pid: int) -> None:
    """A worker whose front was killed ends within a second."""
    end = time.monotonic() + ORPHAN_S
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    outcome.leaks += 1
    outcome.fail(f"worker {pid} outlived its front by more than {ORPHAN_S} s")


def _prompt(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS.split(), k=dice.randint(60, 300)))
