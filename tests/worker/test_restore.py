"""Reading a prefix: whatever fails in it is a miss, never another answer."""

from __future__ import annotations

import pytest

from kvd.store.faults import Faults, FaultyFiles
from kvd.worker import arrival
from tests.worker.rig import B, Rig, ids
from tests.worker.test_ahead import counts, same


@pytest.mark.parametrize(
    ("call", "error"), [("open", "EMFILE"), ("stat", "EIO"), ("preadv", "EIO"), ("preadv", "short")]
)
def test_whichever_call_fails_the_answer_is_the_same(call: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    faults = Faults()
    with Rig(files=lambda: FaultyFiles(faults)) as rig:
        prompt = ids(3 * B, 40)
        asked = prompt + ids(9, 41)
        rig.ask(prompt)
        cold = rig.ask(asked, cache="off")
        missed = False
        for nth in range(1, 100):
            rig.on_engine(rig.cache.clear)
            faults.calls.clear()
            faults.fired, faults.call, faults.error, faults.nth = 0, call, error, nth
            again = rig.ask(asked, cache="read")
            faults.call = ""
            same(cold, again)
            if not faults.fired:
                break
            assert (counts(again)[0] - 9) % B == 0
            missed |= counts(again)[0] > 9
        assert missed == (error != "short")
        assert counts(again)[:3] == (9, 0, 3 * B)
