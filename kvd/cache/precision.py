"""KV precisions by name or table: which bits and groups each layer's keys and values take. Pure.

Keys are the fragile side (an error in K passes through the softmax), so every preset has k_bits >= v_bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvclient.errors import BadRequest
from kvd.cache.layout import BITS, NATIVE, KVLayout, LayerKV, Precision

PRESETS = ("native", "k8v8", "k8v6", "k8v5", "k8v4", "k6v6", "k6v4", "k5v4", "k4v4")
WHOLE = ("native", "16", "32")
"""what means that a side is not quantised"""


def apply(layout: KVLayout, table: dict[str, Any] | str) -> KVLayout:
    """The layout at a preset's or table's precision. Raises BadRequest naming the constraint that is not met."""
    k, v = parse(table, [(layer.k_dim, layer.v_dim) for layer in layout.layers])
    return layout.with_precision(k, v)


def parse(table: dict[str, Any] | str, dims: Sequence[tuple[int, int]]) -> tuple[list[Precision], list[Precision]]:
    """Precision of every layer from text (`native`, `k8v4`, `k8v4g32`, `k8v4,0-3=k8v8,-1=native`) or a table.

    Text: a preset, then overrides LAYERS=PRESET; 16 bits are native. Table: {"k": "8g64", "v": "4g64", "layers":
    {"0": {"k": "native"}, "-1": {…}, "0-3": {…}}}. dims: (k_dim, v_dim) per layer; a preset without a group takes 64,
    or 32 where the head size needs it. Raises BadRequest naming the constraint that is not met.
    """
    if isinstance(table, str):
        table = table_of(table)
    unknown = set(table) - {"k", "v", "layers"}
    if unknown:
        raise BadRequest(f"unknown key in a KV precision: {', '.join(sorted(unknown))}", keys=sorted(unknown))
    k = [_one(table.get("k", "native"), dim[0]) for dim in dims]
    v = [_one(table.get("v", "native"), dim[1]) for dim in dims]
    for where, sides in dict(table.get("layers", {})).items():
        for index in _range(str(where), len(dims)):
            if "k" in sides:
                k[index] = _one(sides["k"], dims[index][0])
            if "v" in sides:
                v[index] = _one(sides["v"], dims[index][1])
    for (k_dim, v_dim), one, other in zip(dims, k, v, strict=True):
        LayerKV(1, k_dim, v_dim, one, other)  # it knows what a head can take
    return k, v


def table_of(text: str) -> dict[str, Any]:
    """A precision's text as a table. Raises BadRequest for what is no such text."""
    base, *overrides = text.split(",")
    table = _preset(base.strip())
    for item in overrides:
        where, equals, name = item.partition("=")
        if not equals:
            raise BadRequest(f"KV precision {text!r}: {item!r} is not LAYERS=PRESET, like 0-3=k8v8", precision=text)
        table.setdefault("layers", {})[where.strip()] = _preset(name.strip())
    return table


def text_of(k: Sequence[Precision], v: Sequence[Precision]) -> str:
    """Shortest text that `parse` takes back, for precisions in the default groups; -1 never occurs in it."""
    names = [_name(a, b) for a, b in zip(k, v, strict=True)]
    base = Counter(names).most_common(1)[0][0]
    parts, first = [base], 0
    for index in range(1, len(names) + 1):
        if index < len(names) and names[index] == names[first]:
            continue
        if names[first] != base:
            where = str(first) if index == first + 1 else f"{first}-{index - 1}"
            parts.append(f"{where}={names[first]}")
        first = index
    return ",".join(parts)


def describe_layers(layout: KVLayout) -> list[str]:
    """For people: one line per range of layers that agree, like "layers 0-3: K 8 bits in groups of 64, V native"."""
    lines, first, layers = [], 0, layout.layers
    for index in range(1, len(layers) + 1):
        if index < len(layers) and (layers[index].k, layers[index].v) == (layers[first].k, layers[first].v):
            continue
        where = f"layer {first}" if index == first + 1 else f"layers {first}-{index - 1}"
        sides = (("K", layers[first].k), ("V", layers[first].v))
        lines.append(f"{where}: " + ", ".join(f"{side} {_words(one, layout.dtype)}" for side, one in sides))
        first = index
    return lines


def _words(precision: Precision, dtype: str) -> str:
    return f"native ({dtype})" if precision.native else f"{precision.bits} bits in groups of {precision.group}"


def _name(k: Precision, v: Precision) -> str:
    return "native" if k.native and v.native else f"k{k.bits or 16}v{v.bits or 16}"


def _preset(name: str) -> dict[str, Any]:
    if name == "native":
        return {"k": "native", "v": "native"}
    body, _, group = name.partition("g")
    k, _, v = body.removeprefix("k").partition("v")
    if not (body.startswith("k") and k.isdigit() and v.isdigit() and (group.isdigit() or not group)):
        known = ", ".join(PRESETS)
        raise BadRequest(
            f"unknown KV precision {name!r}: one of {known}, or with layers of their own like k8v4,0-3=k8v8", name=name
        )
    if wrong := [bits for bits in (k, v) if bits not in WHOLE and int(bits) not in BITS]:
        raise BadRequest(f"KV precision {name!r}: {wrong[0]} bits; there are {', '.join(map(str, BITS))}", name=name)
    suffix = f"g{group}" if group else ""
    return {side: bits if bits in WHOLE else bits + suffix for side, bits in (("k", k), ("v", v))}


def _one(text: str | int, dim: int) -> Precision:
    text = str(text)
    if text in WHOLE:
        return NATIVE
    bits, _, group = text.partition("g")
    if not bits.isdigit() or (group and not group.isdigit()):
        raise BadRequest(f"KV precision {text!r} is not like 8, 8g64 or native", precision=text)
    default = 64 if dim % 64 == 0 else 32
    return Precision(int(bits), int(group) if group else default)


def _range(text: str, layers: int) -> range:
    first, dash, last = text.partition("-") if not text.startswith("-") else (text, "", "")
    try:
        low = int(first) + (layers if int(first) < 0 else 0)
        high = int(last) if dash else low
    except ValueError:
        raise BadRequest(f"layers {text!r} is not an index or a range like 0-3", layers=text) from None
    if not 0 <= low <= high < layers:
        raise BadRequest(f"layers {text} outside the model's 0 … {layers - 1}", layers=text, count=layers)
    return range(low, high + 1)
