"""The form of a loaded model's weights: dense float32 on the CPU backend, the model's own type elsewhere."""

from __future__ import annotations

from typing import Any


def to_float32(model: Any, dense: bool) -> None:
    """Lazily: quantised modules to dense ones (or only their scales to float32), other weights to float32.

    float16 matrices that are kept stay as they are: their float32 form is what did not fit.
    """
    import mlx.core as mx
    from mlx.utils import tree_map, tree_unflatten

    changed = []
    for name, module in model.named_modules():
        if "scales" not in module or not hasattr(module, "bits"):
            continue
        if module.mode == "affine":
            module.scales, module.biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
        if dense and (plain := _dequantised(module)) is not None:
            changed.append((name, plain))
    if changed:
        model.update_modules(tree_unflatten(changed))

    def widened(array: mx.array) -> mx.array:
        small = dense or array.ndim == 1
        return array.astype(mx.float32) if small and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(widened, model.parameters()))


def _dequantised(module: Any) -> Any | None:
    """The dense twin of a quantised module, its product still to be evaluated; None for a kind that has none."""
    import mlx.core as mx
    from mlx import nn as stock
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    nn: Any = stock  # its stubs name no classes
    kinds: dict[type, Any] = {
        nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding, QuantizedSwitchLinear: SwitchLinear,
    }  # fmt: skip
    kind = kinds.get(type(module))
    if kind is None:
        return None
    weight = mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode,
        module.get("global_scale"), mx.float32,
    )  # fmt: skip
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    twin.weight = weight
    if "bias" in module:
        twin.bias = module.bias
    return twin


def to_activation_type(model: Any, config: dict[str, Any]) -> None:
    """On a GPU: norms and biases stored wider than the model's type would widen every activation after them."""
    import mlx.core as mx
    from mlx.utils import tree_map

    wanted = {"float16": mx.float16, "bfloat16": mx.bfloat16}.get(str(config.get("torch_dtype") or config.get("dtype")))
    if wanted is None or not config.get("quantization"):
        return
    narrow = lambda a: a.astype(wanted) if a.dtype == mx.float32 and a.ndim == 1 else a  # noqa: E731
    model.update(tree_map(narrow, model.parameters()))


def evaluate(model: Any) -> None:
    """One array after the other, so that both forms of a weight exist for one matrix at a time."""
    import mlx.core as mx

    model.eval()
    for array in arrays_of(model):
        mx.eval(array)
    mx.clear_cache()


def arrays_of(model: Any) -> list[Any]:
    """All parameters of a model, as mx.arrays."""
    from mlx.utils import tree_flatten

    pairs: Any = tree_flatten(model.parameters())
    return [array for _, array in pairs]
