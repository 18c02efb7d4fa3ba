"""Passes that begin in the middle of a model.

Where only one layer's KV differs, everything before that layer is as it was: layers there are not run but give back
what they gave in a recorded pass over the same tokens. The model's list of layers is changed for the time of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from kvd.cache.check_device import MODEL_ERRORS


class Resume:
    """run: a pass that can be repeated. Not every architecture lets its layers be replaced: one whose second half alone
    does not give the logits of the whole pass, to the bit, always runs from its first layer."""

    def __init__(self, model: Any, run: Callable[[], mx.array]) -> None:
        layers = getattr(model, "layers", None)
        self._layers: list[Any] = layers if isinstance(layers, list) else []
        self._outs: list[Any] = []
        try:
            with self._replaced([_Recorder(layer, self._outs) for layer in self._layers]):
                whole = run()
            mx.eval(whole, self._outs)
            self.works = len(self._outs) == len(self._layers) > 1
            with self.at(len(self._layers) // 2):
                self.works = self.works and bool(mx.array_equal(whole, run()))
        except MODEL_ERRORS:
            self.works = False

    @contextmanager
    def at(self, first: int) -> Iterator[None]:
        """Passes within begin at layer `first`, over the recorded tokens."""
        if not first or not self.works:
            yield
            return
        given = [_Given(layer, self._outs[first - 1]) for layer in self._layers[:first]]
        with self._replaced([*given, *self._layers[first:]]):
            yield

    @contextmanager
    def _replaced(self, others: Sequence[Any]) -> Iterator[None]:
        own = list(self._layers)
        self._layers[:] = others
        try:
            yield
        finally:
            self._layers[:] = own


class _Stand:
    """In a layer's place: models look at attributes of their layers."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Recorder(_Stand):
    def __init__(self, layer: Any, outs: list[Any]) -> None:
        super().__init__(layer)
        self._outs = outs

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._outs.append(self._layer(*args, **options))
        return self._outs[-1]


class _Given(_Stand):
    def __init__(self, layer: Any, out: Any) -> None:
        super().__init__(layer)
        self._out = out

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._out
