"""Many requests of every kind, cancelled at random: nothing of them is left, and answers stay right."""

from __future__ import annotations

import random
from typing import Any

from kvd.worker.scheduler import Limits
from tests.worker.rig import Answer, Rig, ids


def test_random_requests_and_cancels_leave_nothing_behind() -> None:
    random.seed(7)
    limits = Limits(chunk=64)
    with Rig(pool_blocks=64, limits=limits, store_limit=4 << 20) as rig:
        known = [ids(10 + 3 * n, n) for n in range(20)]
        right = [rig.ask(prompt, max_tokens=6, cache="off").text for prompt in known]
        live: list[tuple[Answer, int | None]] = []
        for _ in range(150):
            which = random.randrange(20)
            options: dict[str, Any] = {
                "max_tokens": 6, "durable_wait_ms": random.choice((0, 100)), "salt": random.choice(("", "a")),
                "cache": random.choice(("use", "use", "read", "off")),
            }  # fmt: skip
            if random.random() < 0.3:
                options |= {"temperature": 1.0, "n": 2}
            plain = "n" not in options
            answer = rig.send(tokens=known[which], **options)
            cancelled = random.random() < 0.2
            if cancelled:
                rig.engine.cancel(answer.id, "asked")
            live.append((answer, which if plain and not cancelled else None))
            if len(live) > 10:
                _check(*live.pop(0), right)
        for answer, expected in live:
            _check(answer, expected, right)
        rig.restart()  # ends what is pending
        engine = rig.engine
        for prompt, text in zip(known[:5], right, strict=False):
            assert rig.ask(prompt, max_tokens=6).text == text
        assert rig.on_engine(lambda: (rig.cache.stats.sequences, rig.cache.stats.blocks_live)) == (0, 0)
        assert not engine._live.requests
        assert not engine._admission.questions._open
        assert not engine._admission.fetcher._open and not engine._admission.fetcher._left
        assert not rig.outbox._told


def _check(answer: Answer, which: int | None, right: list[str]) -> None:
    answer.end()
    assert answer.kind == "done", answer.body
    if which is not None:
        assert answer.text == right[which]
