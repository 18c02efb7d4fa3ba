"""Two worker processes write and read beside one owner that evicts: right bytes or a miss, never anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgpack

from kvd.store.base import Reservation, Written
from tests.store.conftest import World, reserve
from torments.actor import Actor
from torments.oracle import Outcome, du, leftovers, room

LIMIT = room(800_000)
ROUNDS = 60
WORKER = """
import sys
import msgpack
from kvd.store.files import RealFiles
from kvd.store.shard import Expected, ShardDamaged, read_shard, store_shard
from torments.blocks import empty_like, header, payload

for job in msgpack.Unpacker(open(0, "rb", buffering=0), raw=False, use_list=False):
    block = header(list(job["tokens"]))
    if job["do"] == "write":
        size, checksum = store_shard(RealFiles(), job["temp"], job["final"], block, payload(block))
        answer = {"size": size, "checksum": checksum}
    else:
        into = empty_like(block)
        asked = Expected(block.namespace, block.chain, block.parent, block.tokens, 0, block.tensors)
        try:
            read_shard(RealFiles(), job["path"], None, asked, into)
            answer = {"found": "right" if into == payload(block) else "wrong"}
        except FileNotFoundError:
            answer = {"found": "vanished"}
        except ShardDamaged as damage:
            answer = {"found": damage.reason}
    sys.stdout.buffer.write(msgpack.packb(answer))
    sys.stdout.buffer.flush()
"""


class Worker:
    def __init__(self) -> None:
        path = ":".join(str(Path(__file__).resolve().parents[2] / p) for p in ("tools", "."))
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PYTHONPATH": path},
        )
        assert self.process.stdin and self.process.stdout
        self.answers = msgpack.Unpacker(self.process.stdout, raw=False)

    def tell(self, **job: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgpack.packb(job))
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(30) == 0


def write_and_read(actor: Actor, workers: list[Worker], number: int) -> list[str]:
    """Both workers write at once; then both read at once what the owner finds, while it evicts half of it."""
    core = actor.store.core
    places = [reserve(actor, [number, w, 3]) for w in range(2)]
    for worker, (w, place) in zip(workers, enumerate(places), strict=True):
        assert isinstance(place, Reservation)
        worker.tell(do="write", tokens=[number, w, 3], temp=place.temp, final=place.final)
    written = []
    for worker, place in zip(workers, places, strict=True):
        done = next(worker.answers)
        assert isinstance(place, Reservation)
        written.append(Written(place.id, done["checksum"], done["size"]))
    assert all(item.ok for item in actor.store.commit(written))
    for w, worker in enumerate(workers):
        tokens = [number - number % 7, w, 3]
        found = actor.store.lookup(actor.namespace, [], actor.namespace, tokens).child
        assert found
        chain = actor.blocks(tokens)[0].chain
        worker.tell(do="read", tokens=tokens, path=core.tree.shard(actor.namespace, chain))
    core.evict(20_000, core.table.slots.values(), "test", ())
    return [next(worker.answers)["found"] for worker in workers]


def test_readers_beside_eviction_get_right_bytes_or_a_miss(world: World) -> None:
    actor = world.open(LIMIT)
    workers = [Worker(), Worker()]
    seen: set[str] = set()
    for number in range(ROUNDS):
        world.now += 1
        seen.update(write_and_read(actor, workers, number))
        assert du(world.folder) <= LIMIT
    for worker in workers:
        worker.end()
    assert seen <= {"right", "vanished"} and "right" in seen
    outcome = Outcome("two workers")
    leftovers(outcome, actor.store, "end")
    assert outcome.failures == []
