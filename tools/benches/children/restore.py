"""Time to first token behind a prefix on disk, with the engine's own code: layer by layer, and whole blocks first."""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benches.store import forget
from kvclient.wire import unpack
from kvd.cache.chain import next_chain
from kvd.cache.check import check
from kvd.cache.inspection import inspect_layout
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.messages import Entry, Event, LookedUp, Lookup, to_front
from kvd.models.load import load
from kvd.store.files import RealFiles
from kvd.store.shard import ShardHeader, write_shard
from kvd.worker.arrival import layer_groups
from kvd.worker.assemble import CHUNK_CPU, make_engine
from kvd.worker.beat import Heart
from kvd.worker.engine import Engine, Model
from kvd.worker.fetch import Restore
from kvd.worker.outbox import Outbox
from kvd.worker.params import Params, Sampling
from kvd.worker.prompt import Prompt
from kvd.worker.request import Choice
from kvd.worker.scheduler import Limits
from kvd.worker.spill import tensor_specs
from kvd.worker.text import PLAIN

BLOCK = 256
NAMESPACE = bytes(16)
WHOLE = 1 << 60
"""bytes of a group: one group, so that compute starts when everything is there"""


class Disk(RealFiles):
    """Reads at `rate` bytes per second, however many threads read; 0: as fast as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        if self.rate:
            with self._lock:
                self._free_at = at = max(self._free_at, time.monotonic()) + got / self.rate
            time.sleep(max(at - time.monotonic(), 0.0))
        return got


class Bench:
    """One engine on a thread of its own; this one plays the front and the client. Stored rows are random."""

    def __init__(self, model: Path, folder: str, blocks: int) -> None:
        self._disk = Disk()
        self._outbox = Outbox()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._outbox.wake = lambda: self._wakes.put(True)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(model, blocks, ready), daemon=True)
        self._thread.start()
        ready.wait()
        self.tokens = [10 + n % 1000 for n in range(blocks * BLOCK)]
        self._entries = list(_stored(folder, self._layout, self.tokens))
        self._asked = 0
        self._ahead = 0

    def _run(self, folder: Path, blocks: int, ready: threading.Event) -> None:
        loaded = load(folder)
        self._layout = inspect_layout(loaded.model)
        room = blocks + 8
        self._cache = PagedCache(self._layout, BLOCK, room, initial_blocks=room, namespace=NAMESPACE)
        self._cache.paths = check(loaded.model, self._layout, BLOCK, "bench").paths
        model = Model(loaded.model, loaded.tokenizer, self._layout, NAMESPACE, frozenset())
        self._engine: Engine = make_engine(
            model, self._cache, self._outbox, Heart(self._outbox), self._disk, Limits(chunk=CHUNK_CPU), 1 << 26
        )
        self._watch()
        ready.set()
        self._engine.run()
        self._engine.close(5.0)

    def _watch(self) -> None:
        """Count the passes that began while their rows were being read."""
        computer = self._engine._computer
        begin = computer.ahead

        def ahead(choice: Choice, end: int, restore: Restore) -> mx.array | None:
            found = begin(choice, end, restore)
            self._ahead += 1
            return found

        computer.ahead = ahead  # type: ignore[method-assign]

    def first_token(self, tail: int, *, layered: bool, rate: float) -> dict[str, float]:
        """Of the stored prefix with `tail` other tokens behind it (0: as it is): seconds, and whether compute began
        while rows were being read. rate: bytes per second of the disk; 0: as it is, with nothing in the page cache."""
        self._disk.rate = rate
        self._on_engine(lambda: self._forget(layered))
        if not rate and hasattr(os, "posix_fadvise"):
            forget([entry.path for entry in self._entries])
        self._asked += 1
        tokens = (*self.tokens, *(5000 + (self._asked * 7919 + n * 31) % 9000 for n in range(tail)))
        prompt = Prompt(tokens, Params("generate", Sampling(), max_tokens=1, cache="read"), PLAIN)
        self._engine.submit("generate", str(self._asked), prompt, time.monotonic())
        stats = self._end()
        assert stats["cached_ssd_tokens"] == len(tokens) - max(tail, 1), stats
        began, self._ahead = self._ahead, 0
        return {"seconds": stats["ttft_s"], "ahead": began}

    def _forget(self, layered: bool) -> None:
        self._cache.clear()
        nbytes = None if layered else WHOLE
        self._engine._admission.fetcher._groups = layer_groups(self._layout, BLOCK, nbytes)

    def _on_engine(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._engine.post(act)
        done.wait()

    def _end(self) -> dict[str, Any]:
        while self._wakes.get():
            while (sent := self._outbox.take()) is not None:
                match to_front(sent):
                    case Lookup(q, _, chains):
                        hits = [e for e, chain in zip(self._entries, chains, strict=False) if e.chain == chain]
                        self._engine.looked_up(LookedUp(q, tuple(hits), None, 0))
                    case Event("error", _, packed):
                        raise RuntimeError(unpack(packed))
                    case Event("done", _, packed):
                        stats: dict[str, Any] = unpack(packed)["stats"]
                        return stats
        raise RuntimeError("no end")

    def close(self) -> None:
        self._engine.stop(0.0)
        self._thread.join()


def _stored(folder: str, layout: KVLayout, tokens: Sequence[int]) -> Iterator[Entry]:
    """Shards of a prefix, random numbers for rows."""
    files, parent, random = RealFiles(), NAMESPACE, np.random.default_rng(0)
    specs = tensor_specs(layout, BLOCK)
    for start in range(0, len(tokens), BLOCK):
        part = tuple(tokens[start : start + BLOCK])
        chain = next_chain(parent, part)
        header = ShardHeader(NAMESPACE, chain, parent, part, start, layout.describe(), specs)
        data = [random.standard_normal(spec.shape, dtype=np.float32).data.cast("B") for spec in specs]
        path = os.path.join(folder, f"{chain.hex()}.safetensors")
        size, checksum = write_shard(files, path, header, data, durable=True)
        yield Entry(chain, parent, BLOCK, path, size, checksum)
        parent = chain


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd", dir=sys.argv[2]) as folder:
        bench = Bench(Path(sys.argv[1]), folder, int(sys.argv[3]))
        for line in sys.stdin:
            print(json.dumps(bench.first_token(**json.loads(line))), flush=True)
        bench.close()


if __name__ == "__main__":
    main()
