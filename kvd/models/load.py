"""A model folder into memory, with mlx-lm: weights, tokenizer, and what there is to know about them.

On the CPU backend every weight becomes dense float32, the only form that is fast there. What that takes is known from
headers beforehand; when it does not fit, the stored form is kept and its cost told, or the load is refused with both
numbers. Nothing of a model's folder is ever run: no code, no pickle; chat templates render in jinja's sandbox.

mlx is imported by `load` and `import_mlx_lm` only. Load and run in the same thread.
"""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.descriptors import WANTED
from kvclient.errors import OutOfMemory, UnsupportedModel
from kvd.models.backend import Backend, actual
from kvd.models.facts import context_length, text_config
from kvd.models.fingerprint import read_config
from kvd.models.size import Sizes, sizes
from kvd.models.weights import arrays_of, evaluate, to_activation_type, to_float32
from kvd.units import format_size

_MODEL_TYPE = re.compile(r"[A-Za-z0-9_\-]{1,64}")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model. `context_length` is None where the configuration names none."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int | None
    vocab: int
    """ids that the embedding has rows for; valid ids are 0 <= id < vocab"""
    weights_bytes: int
    backend: Backend
    dtype: str
    """type of the activations, and of native KV"""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """`model` is an mlx-lm model, `tokenizer` mlx-lm's TokenizerWrapper."""

    model: Any
    tokenizer: Any
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Form:
    """How weights will lie in memory: dense float32 or as stored, and what to tell about it."""

    dense: bool
    notes: tuple[str, ...] = ()


def choose_form(found: Sizes, backend: Backend, available: int | None) -> Form:
    """Pure. `available` bytes are for the weights alone, None means no limit. Raises OutOfMemory with both numbers."""
    if backend != "cpu":
        if available is not None and found.stored > available:
            raise _does_not_fit(found.stored, available, "its weights")
        return Form(False)
    if available is None or found.dense <= available:
        return Form(True)
    if found.kept <= available:
        cost = (
            f"float32 weights need {format_size(found.dense)}, {format_size(available)} are available: kept as stored "
            f"({format_size(found.kept)}), which makes prefill about 20 times slower on this backend"
        )
        return Form(False, (cost,))
    raise _does_not_fit(min(found.dense, found.kept), available, "its weights, even as stored,")


def _does_not_fit(needed: int, available: int, what: str) -> OutOfMemory:
    return OutOfMemory(
        f"the model does not fit: {what} need {format_size(needed)}, {format_size(available)} are available",
        needed=needed, available=available, what="weights",
    )  # fmt: skip


def load(folder: Path, backend: Backend | None = None, *, available: int | None = None) -> Loaded:
    """Load the model in `folder`. `available`: bytes that its weights may take; decided before anything is allocated.

    Raises UnsupportedModel (by name: architecture, weights or tokenizer that mlx-lm cannot take), BadRequest (files
    that cannot be read) or OutOfMemory.
    """
    config = read_config(folder)
    check_safe(folder, config)
    found = sizes(folder)
    import_mlx_lm()
    backend = backend or actual()
    form = choose_form(found, backend, available)
    model, config = _load_model(folder, config)
    if backend == "cpu":
        to_float32(model, form.dense)
    else:
        to_activation_type(model, config)
    if backend == "cuda":
        from kvd.models.rows import put_together

        put_together(model)
    evaluate(model)
    tokenizer = load_tokenizer(folder, config)
    return Loaded(model, tokenizer, _info(model, config, backend, form.notes))


def import_mlx_lm() -> None:
    """Import mlx_lm without its side effects: whatever imports it first in a process of ours calls this before.

    It sets RLIMIT_NOFILE to (2048, 4096), which cannot be undone: the limits stay, and the soft one is raised to the
    hard one. Its transformers imports torch where that is installed, seconds and memory that no tokenizer needs, so to
    this process torch is not installed.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own word for "not there"
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda which, limits: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
    raise_file_limit()


def raise_file_limit() -> None:
    """The soft limit on open files becomes the hard one (at most 1 Mi), where that works. macOS says "unlimited" and
    may refuse more than WANTED."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_safe(folder: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedModel where the configuration names no architecture, or code of the model's own."""
    kind = config.get("model_type")
    if config.get("model_file"):
        raise UnsupportedModel(
            f"{folder.name}: needs code of its own ({config['model_file']}), which is never run",
            file=str(folder), architecture=kind,
        )  # fmt: skip
    if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
        raise UnsupportedModel(f"{folder.name}: config.json names no model_type", file=str(folder))


def _load_model(folder: Path, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    kind = str(config["model_type"])
    try:
        model, full = load_model(folder, lazy=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        said = _first_line(error)
        raise UnsupportedModel(
            f"{folder.name}: architecture {kind} cannot be loaded: {said}", architecture=kind, reason=said
        ) from error
    return model, full


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's TokenizerWrapper over the files in `folder` alone. Raises UnsupportedModel."""
    from mlx_lm import utils

    load_wrapped: Any = utils.load_tokenizer
    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        return load_wrapped(folder, options, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        said = _first_line(error)
        raise UnsupportedModel(f"{folder.name}: its tokenizer cannot be loaded: {said}", reason=said) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _info(model: Any, config: dict[str, Any], backend: Backend, notes: tuple[str, ...]) -> ModelInfo:
    import mlx.core as mx

    text = text_config(config)
    heads = int(text.get("num_attention_heads") or 0)
    arrays = arrays_of(model)
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating) and array.ndim == 1]
    return ModelInfo(
        architecture=str(config["model_type"]),
        layers=int(text.get("num_hidden_layers") or len(getattr(model, "layers", ()))),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0)),
        context_length=context_length(config),
        vocab=int(text.get("vocab_size") or 0),
        weights_bytes=sum(array.nbytes for array in arrays),
        backend=backend,
        dtype=str(floats[0].dtype if floats else mx.float32).rpartition(".")[2],
        notes=notes,
    )
