"""Rows of a decode batch go through quantised layers as one product, and come out as they did."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from kvd.models.rows import EmbeddingRowsTogether, RowsTogether, put_together


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = [nn.Linear(128, 64, bias=False), nn.Linear(64, 128)]
        self.dense = nn.Linear(128, 128)


@pytest.fixture
def net():
    made = Net()
    wanted = lambda path, module: path != "dense" and hasattr(module, "to_quantized")  # noqa: E731
    nn.quantize(made, group_size=64, bits=4, class_predicate=wanted)
    mx.eval(made.parameters())
    return made


def test_every_quantised_layer_is_reached_and_no_other(net):
    assert put_together(net) == 3
    assert isinstance(net.embed, EmbeddingRowsTogether)
    assert all(isinstance(layer, RowsTogether) for layer in net.layers)
    assert type(net.dense) is nn.Linear
    assert put_together(net) == 0


@pytest.mark.parametrize("shape", [(8, 1, 128), (1, 8, 128), (1, 1, 128), (3, 5, 128), (6, 128)])
def test_results_and_shapes_stay(net, shape, monkeypatch):
    x = mx.random.normal(shape)
    expected = [net.layers[0](x), net.embed.as_linear(x)]
    put_together(net)
    given, product = [], mx.quantized_matmul

    def noted(x, *rest, **more):
        given.append(x.shape)
        return product(x, *rest, **more)

    monkeypatch.setattr(mx, "quantized_matmul", noted)
    got = [net.layers[0](x), net.embed.as_linear(x)]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        assert mx.allclose(mine, theirs, atol=1e-4).item()
    assert given == [(1, 8, 128) if shape == (8, 1, 128) else shape] * 2
