"""KV precisions by name or table: which bits and groups each layer's keys and values take. Pure.

Keys are the fragile side (an error in K passes through the softmax), so every preset has k_bits >= v_bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient.errors import BadRequest
from kvd.cache.layout import NATIVE, KVLayout, Precision

PRESETS = ("native", "k8v8", "k8v6", "k8v5", "k8v4", "k6v6", "k6v4", "k5v4", "k4v4")


def apply(layout: KVLayout, table: dict[str, Any] | str) -> KVLayout:
    """The layout at a preset's or table's precision. Raises BadRequest naming the constraint that is not met."""
    k, v = parse(table, [(layer.k_dim, layer.v_dim) for layer in layout.layers])
    return layout.with_precision(k, v)


def parse(table: dict[str, Any] | str, dims: Sequence[tuple[int, int]]) -> tuple[list[Precision], list[Precision]]:
    """Precision of every layer from a preset name (`native`, `k8v4`, `k8v4g32`) or a table.

    Table: {"k": "8g64", "v": "4g64", "layers": {"0": {"k": "native"}, "-1": {…}, "0-3": {…}}}.
    dims: (k_dim, v_dim) per layer; a preset without a group takes 64, or 32 where the head size needs it.
    """
    if isinstance(table, str):
        table = _preset(table)
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
    return k, v


def _preset(name: str) -> dict[str, Any]:
    if name == "native":
        return {}
    body, _, group = name.partition("g")
    k, _, v = body.removeprefix("k").partition("v")
    if not (body.startswith("k") and k.isdigit() and v.isdigit() and (group.isdigit() or not group)):
        raise BadRequest(f"unknown KV precision {name!r}: one of {', '.join(PRESETS)} or a table", name=name)
    suffix = f"g{group}" if group else ""
    return {"k": k + suffix, "v": v + suffix}


def _one(text: str | int, dim: int) -> Precision:
    text = str(text)
    if text in ("native", "16", "32"):
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
