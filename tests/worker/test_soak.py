"""Many requests of every kind, cancelled at random: nothing of them is left, and answers stay right."""

from __future__ import annotations

import random
from typing import Any

from kvd.cache.results import Consent
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


def test_answers_are_those_of_an_idle_worker_whoever_gives_way_and_after_restarts() -> None:
    source = random.Random(11)
    trunk = ids(70, 900)
    asked: list[dict[str, Any]] = [
        {
            "tokens": trunk[: source.randrange(1, 71)] + ids(source.choice((3, 16, 60, 130)), n),
            "max_tokens": source.choice((2, 17, 40)), "n": source.choice((1, 1, 2, 3)), "temperature": 1.0, "seed": n,
            "logit_bias": {2: -100},
        }
        for n in range(16)
    ]  # fmt: skip
    with Rig() as rig:
        right = [_texts(rig.send(**one, cache="off").end()) for one in asked]
    large = max(range(16), key=lambda n: len(asked[n]["tokens"]))
    recomputed = 0

    def consent(nbytes: int, needed: bool) -> Consent:
        """So that the first chunk fills the pool."""
        return Consent.YES if needed or nbytes < 0 else Consent.NO

    with Rig(pool_blocks=21, limits=Limits(chunk=128, max_live=8), consent=consent) as rig:
        for _ in range(3):
            assert _texts(rig.send(**asked[large]).end()) == right[large]
            order = [n % 16 for n in source.sample(range(32), 28)]
            sent = [
                rig.send(
                    **asked[n], cache=source.choice(("use", "use", "read", "off")), durable_wait_ms=0,
                    priority=source.choice(("interactive", "background")),
                )
                for n in order
            ]  # fmt: skip
            for answer in source.sample(sent, 4):
                rig.engine.cancel(answer.id, "asked")
            for n, answer in zip(order, sent, strict=True):
                answer.end()
                if any(choice["finish_reason"] == "cancelled" for choice in answer.body["choices"]):
                    continue
                assert _texts(answer) == right[n]
                stats = answer.stats
                assert stats["cached_tokens"] + stats["computed_tokens"] == len(asked[n]["tokens"])
                recomputed += stats["recomputed_tokens"]
            assert rig.on_engine(lambda: rig.cache.stats.sequences) == 0
            rig.restart()
    assert recomputed > 0, "nobody had to give way"


def _texts(answer: Answer) -> list[str]:
    answer.check()
    return [choice["text"] for choice in answer.body["choices"]]
