"""Steps put in line ahead copy the pool on some devices, and there perhaps only once they take long."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.worker.rig import B, Rig, ids


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.mark.parametrize("copies", [False, True])
def test_looking_ahead_ends_within_a_block_when_an_update_copied_the_pool(rig: Rig, copies: bool) -> None:
    computer, kept = rig.engine._computer, []
    finish, pool = computer.finish, rig.cache.pool

    def busy(ahead: bool) -> object:
        """As a device does that has not let go of what the step before read."""
        if copies and ahead:
            kept.append(pool.arrays[0][..., :1, :])
            mx.eval(kept[-1])
        return finish(ahead)

    computer.finish = busy  # type: ignore[method-assign]
    answer = rig.send(tokens=ids(20), max_tokens=2 * B, temperature=0.0, logit_bias={2: -100}).end()
    assert answer.stats["completion_tokens"] == 2 * B
    assert rig.on_engine(lambda: rig.cache.paths.ahead) is not copies
