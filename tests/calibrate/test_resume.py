"""Passes from the middle of a model are those from its first layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvd.calibrate.resume import Resume
from tests.cache.support import model, prompt, same

IDS = mx.array([prompt(40, 3)])


def counted(net: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which layers ran, in order."""
    ran: list[int] = []
    kind = type(net.layers[0])
    original = kind.__call__
    own = list(net.layers)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        ran.append(next(i for i, layer in enumerate(own) if layer is self))
        return original(self, *args, **options)

    monkeypatch.setattr(kind, "__call__", call)
    return ran


def test_only_layers_from_the_first_on_run_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(layers=4)
    ran = counted(net, monkeypatch)
    resume = Resume(net, lambda: net(IDS))
    assert resume.works and ran == [0, 1, 2, 3, 2, 3]
    whole = net(IDS)
    for first in range(4):
        ran.clear()
        with resume.at(first):
            assert same(net(IDS), whole)
        assert ran == list(range(first, 4))
    ran.clear()
    assert same(net(IDS), whole) and ran == [0, 1, 2, 3]


def test_a_model_that_does_more_between_its_layers_runs_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(layers=4)

    def more() -> mx.array:
        return net(IDS) + sum(layer(mx.ones((1, 3, net.args.hidden_size))).sum() for layer in net.layers)

    resume = Resume(net, more)
    assert not resume.works
    ran = counted(net, monkeypatch)
    with resume.at(2):
        net(IDS)
    assert ran == [0, 1, 2, 3]


def test_a_model_without_a_list_of_layers_runs_as_it_is() -> None:
    whole = mx.ones((2, 3))
    resume = Resume(object(), lambda: whole)
    assert not resume.works
    with resume.at(1):
        pass
