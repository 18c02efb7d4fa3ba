"""The short form of `tools/torture`: whatever fails, no wrong byte, nothing acknowledged lost, the limit held."""

from __future__ import annotations

import pytest

from torments.__main__ import CAMPAIGNS


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_fault_costs_no_acknowledged_block_and_no_byte(name: str) -> None:
    outcome = CAMPAIGNS[name][0](True)
    assert outcome.failures == []
    assert outcome.ok and outcome.runs
