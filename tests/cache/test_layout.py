"""Layouts and precisions: bytes by formula, order of parts, and refusals that name the constraint."""

from __future__ import annotations

import pytest

from kvclient.errors import BadRequest
from kvd.cache.layout import KVLayout, LayerKV, Precision, head_sizes
from kvd.cache.precision import PRESETS, apply, parse, table_of

DEMO = KVLayout((LayerKV(3, 64, 64),) * 30, "float32")


def test_head_sizes_are_read_from_what_describes_a_layout():
    mixed = KVLayout((LayerKV(3, 64, 64), LayerKV(1, 192, 128, k=Precision(8, 64))), "bfloat16")
    assert head_sizes(mixed.describe()) == [(64, 64), (192, 128)]


def test_bytes_per_token_of_the_demo_model_are_those_of_the_formula():
    assert DEMO.bytes_per_token() == 46_080
    half = KVLayout(DEMO.layers, "float16")
    assert half.bytes_per_token() == 23_040
    expected = {"k8v8g64": 12_240, "k8v4g64": 9_360, "k4v4g64": 6_480}
    for name, size in expected.items():
        assert apply(half, name).bytes_per_token() == size


def test_parts_come_layer_by_layer_k_before_v_words_before_scales():
    layout = KVLayout((LayerKV(2, 64, 64), LayerKV(2, 64, 128, Precision(8, 32), Precision(4, 64))), "bfloat16")
    assert [part.name for part in layout.parts] == ["k.0", "v.0", "k.1.w", "k.1.s", "k.1.b", "v.1.w", "v.1.s", "v.1.b"]
    assert [(part.dtype, part.width) for part in layout.parts[2:]] == [
        ("uint32", 16), ("bfloat16", 2), ("bfloat16", 2), ("uint32", 16), ("bfloat16", 2), ("bfloat16", 2),
    ]  # fmt: skip


def test_whatever_changes_bytes_changes_the_description():
    layouts = [DEMO, KVLayout(DEMO.layers, "float16"), KVLayout(DEMO.layers[1:], "float32")]
    layouts += [apply(DEMO, name) for name in (*PRESETS[1:], "k8v8g32", "k4v8")]
    layouts.append(apply(DEMO, {"layers": {"3": {"k": 8}}}))
    layouts.append(apply(DEMO, {"layers": {"3": {"v": 8}}}))
    assert len({layout.describe() for layout in layouts}) == len(layouts)


def test_overrides_name_layers_from_either_end_and_in_ranges():
    k, v = parse({"k": "8", "v": "4g32", "layers": {"0-3": {"k": "native"}, "-1": {"v": "8g64"}}}, [(64, 64)] * 6)
    assert [p.bits for p in k] == [0, 0, 0, 0, 8, 8]
    assert [(p.bits, p.group) for p in v] == [(4, 32)] * 5 + [(8, 64)]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("k7v7", "bits"), ("k8v8g48", "must be one of"), ("huge", "huge"), ("k8", "k8"), ({"q": 8}, "q"),
        ({"layers": {"9": {"k": 8}}}, "9"), ({"layers": {"a-b": {"k": 8}}}, "a-b"), ({"k": "8g128"}, "head size 64"),
        ({"k": "fast"}, "fast"),
    ],
)  # fmt: skip
def test_a_precision_that_cannot_be_is_refused_by_what_is_wrong(table, names):
    with pytest.raises(BadRequest, match=names):
        apply(KVLayout((LayerKV(2, 64, 64),) * 4, "float32"), table)


@pytest.mark.parametrize("text", ["k7v99", "k8v4,0-3=k9v8", "k1v8"])
def test_bits_that_no_model_takes_are_refused_without_one(text):
    with pytest.raises(BadRequest, match="bits; there are 2, 3"):
        table_of(text)


def test_heads_that_no_group_divides_are_refused():
    with pytest.raises(BadRequest, match="head size 80"):
        apply(KVLayout((LayerKV(2, 80, 80),), "float16"), "k8v8")
