"""Whatever happens in whatever order, every request of a living client ends exactly once, and nothing is left over."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

from kvclient import wire
from tests.front.support import Client, Daemon, daemon, until

PROMPTS = ("say 3", "slow 20 0.01", "hold", "mute", "abort", "exit 1", "flood 500 200", "die")
MODELS = ("a", "b")
STEPS = 60


class Chaos:
    def __init__(self, made: Daemon, dice: random.Random) -> None:
        self.made, self.dice = made, dice
        self.clients = [Client(made.socket) for _ in range(2)]
        self.open: dict[str, Client] = {}
        self.ends: Counter[str] = Counter()

    def step(self) -> None:
        self.dice.choices(
            [self.ask, self.cancel, self.unload, self.load, self.kill_worker, self.die, self.read, self.rest],
            weights=[10, 5, 1, 1, 1, 1, 6, 3],
        )[0]()

    def ask(self) -> None:
        client = self.dice.choice(self.clients)
        prompt = {"prompt": self.dice.choice(PROMPTS)}
        self.open[client.ask(self.dice.choice(("generate", "count")), prompt, self.dice.choice(MODELS))] = client

    def cancel(self) -> None:
        if self.open:
            self.call("cancel", {"id": self.dice.choice(sorted(self.open))})

    def unload(self) -> None:
        self.call("unload", {"model": self.dice.choice(MODELS)})

    def load(self) -> None:
        self.call("load", {"model": self.dice.choice(MODELS)})

    def call(self, verb: str, body: dict[str, str]) -> None:
        client = self.dice.choice(self.clients)
        self.open[client.ask(verb, body)] = client

    def kill_worker(self) -> None:
        pids = [m["pid"] for m in self.made.status()["models"] if m.get("pid")]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.dice.choice(pids), signal.SIGKILL)

    def die(self) -> None:
        """A client goes away, and with it whatever it asked for."""
        place = self.dice.randrange(len(self.clients))
        dying = self.clients[place]
        dying.close()
        self.open = {id: client for id, client in self.open.items() if client is not dying}
        self.clients[place] = Client(self.made.socket)

    def rest(self) -> None:
        time.sleep(self.dice.random() * 0.3)

    def read(self) -> None:
        for client in self.clients:
            while client.socket.poll(1):
                self.take(client.next())

    def take(self, message: wire.Message) -> None:
        if message.kind in wire.TERMINAL:
            self.ends[message.id] += 1
            self.open.pop(message.id, None)

    def finish(self) -> None:
        """Cancel what waits for that, and read until everything has ended."""
        def quiet() -> bool:
            self.read()
            for id in list(self.open):
                with self.made.control() as control:
                    control.ask("cancel", {"id": id})
                    control.next()
            return not self.open

        until(quiet, "every request's end", 60)


@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_once_and_nothing_is_left_over(seed: int) -> None:
    flags = ("daemon.respawn_delay=0.05", "daemon.crash_limit=1000", "daemon.max_waiting=6")
    with daemon(*flags, models=MODELS) as made:
        chaos = Chaos(made, random.Random(seed))
        for _ in range(STEPS):
            chaos.step()
        chaos.finish()
        assert set(chaos.ends.values()) == {1}
        until(lambda: not made.status()["requests"], "requests of dead clients to end")
        status = until(lambda: settled(made), "the models to come to rest")
        running = [m for m in status["models"] if m.get("pid")]
        assert set(status["memory"]["by_model"]) == {m["name"] for m in running}
        assert len(list((made.home / "run" / "workers").iterdir())) == len(running)
        for client in chaos.clients:
            client.close()


def settled(made: Daemon) -> dict[str, object] | None:
    status = made.status()
    states = {m["state"] for m in status["models"]}
    busy = any(m.get("live") or m.get("waiting") for m in status["models"])
    return status if states <= {"loaded", "not loaded"} and not busy else None
