from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from kvclient.errors import OutOfMemory, UnsupportedModel
from kvd.models.fingerprint import weight_files
from kvd.models.load import choose_form, load
from kvd.models.size import Sizes, sizes
from kvd.models.tensors import read_specs
from tests.models.quantised import quantise
from tests.tiny import tiny_model

IDS = mx.array([[5, 300, 17, 42, 7, 301, 9, 250]])
MIB = 1 << 20


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(IDS))


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("bits", [4, 8])
def test_on_the_cpu_quantised_weights_become_dense_float32_as_announced(tmp_path: Path, bits: int) -> None:
    folder = quantise(tiny_model(tmp_path / "m"), bits)
    announced = sizes(folder).dense
    loaded = load(folder, "cpu", available=announced)
    assert loaded.info.dtype == "float32" and loaded.info.notes == ()
    assert loaded.info.weights_bytes == announced
    assert not [name for name, module in loaded.model.named_modules() if hasattr(module, "bits")]
    stock = logits(load_model(folder)[0])
    assert np.allclose(logits(loaded.model), stock, atol=2e-2 * np.abs(stock).max())


def test_below_that_they_stay_as_stored_and_the_cost_is_told(tmp_path: Path) -> None:
    folder = quantise(tiny_model(tmp_path / "m"), 4)
    found = sizes(folder)
    loaded = load(folder, "cpu", available=found.dense - 1)
    assert loaded.info.weights_bytes == found.kept < found.dense
    assert "20 times slower" in loaded.info.notes[0]
    assert loaded.info.dtype == "float32"
    dense = logits(load(folder, "cpu").model)
    assert np.allclose(logits(loaded.model), dense, atol=1e-3 * np.abs(dense).max())


def test_what_does_not_fit_at_all_is_refused_with_both_numbers_before_anything_is_allocated(tmp_path: Path) -> None:
    folder = quantise(tiny_model(tmp_path / "m", layers=4, heads=8, head_dim=64), 4)
    needed = sizes(folder).kept
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(OutOfMemory, match="does not fit") as caught:
        load(folder, "cpu", available=needed - 1)
    assert caught.value.details["needed"] == needed
    assert caught.value.details["available"] == needed - 1
    assert mx.get_peak_memory() - before < needed // 10


def test_the_peak_of_a_load_is_one_matrix_above_its_end(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", layers=6, heads=8, head_dim=64, vocab=1024)
    largest = max(4 * spec.elements for file in weight_files(folder) for spec in read_specs(file))
    found = sizes(quantise(folder, 8))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    loaded = load(folder, "cpu")
    assert mx.get_peak_memory() - before <= found.dense + 2 * largest + MIB
    del loaded


@pytest.mark.parametrize(
    ("backend", "available", "dense"),
    [("cpu", None, True), ("cpu", 800, True), ("cpu", 799, False), ("metal", None, False)],
)
def test_the_form_follows_backend_and_budget(backend: Any, available: int | None, dense: bool) -> None:
    found = Sizes(stored=100, dense=800, kept=120)
    form = choose_form(found, backend, available)
    assert form.dense is dense
    assert bool(form.notes) is (available == 799)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_a_gpu_refuses_what_is_larger_than_stored(backend: Any) -> None:
    with pytest.raises(OutOfMemory):
        choose_form(Sizes(stored=100, dense=800, kept=120), backend, 99)


def test_a_models_own_code_is_never_run(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    trap = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(trap)!r}, 'w')")
    edit(folder, "config.json", model_file="mine.py")
    with pytest.raises(UnsupportedModel, match="mine.py.*never run"):
        load(folder)
    assert not trap.exists()


def test_a_tokenizers_own_code_is_never_run(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    trap = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(trap)!r}, 'w')\nclass T: pass")
    edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.T", None]}, tokenizer_class="T")
    (folder / "tokenizer.json").rename(folder / "elsewhere.json")
    with pytest.raises(UnsupportedModel, match="tokenizer cannot be loaded"):
        load(folder)
    assert not trap.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin, a pickle"):
        load(folder)


def test_a_chat_template_cannot_reach_python(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    edit(folder, "tokenizer_config.json", chat_template="{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe"):
        load(folder).tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    edit(folder, "config.json", model_type="hyperloop")
    with pytest.raises(UnsupportedModel, match="architecture hyperloop"):
        load(folder)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"hidden_size": 64}, {"num_attention_heads": "x"}])
def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "m")
    edit(folder, "config.json", **changes)
    with pytest.raises(UnsupportedModel, match="architecture llama cannot be loaded"):
        load(folder)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnsupportedModel, match="truncated"):
        load(folder)


def test_what_is_known_about_a_model(tmp_path: Path) -> None:
    info = load(tiny_model(tmp_path / "m", "qwen3", layers=3, context=777)).info
    assert (info.architecture, info.layers, info.heads, info.kv_heads, info.head_dim) == ("qwen3", 3, 4, 2, 32)
    assert (info.context_length, info.vocab) == (777, 512)


def test_importing_mlx_lm_leaves_the_limit_on_open_files_as_high_as_it_may_be() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 3000))\n"
        "from kvd.models.load import import_mlx_lm; import_mlx_lm()\n"
        "import mlx_lm.utils\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3000", "3000"]


def test_a_torch_that_is_installed_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('__version__ = "2.9.0"\nopen("imported", "w").close()\n')
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    model = tiny_model(tmp_path / "m")
    script = (
        "import sys; from pathlib import Path\n"
        "from kvd.models.load import import_mlx_lm, load; import_mlx_lm()\n"
        "import kvd.worker.assemble\n"
        "print(len(load(Path(sys.argv[1])).tokenizer.encode('hello')) > 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-P", "-c", script, str(model)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert not (tmp_path / "imported").exists()
    assert done.stdout == "True\n", done.stderr[-2000:]


@pytest.mark.parametrize("process", ["kvd.worker.main", "kvd.calibrate.child"])
def test_a_process_that_will_own_mlx_has_not_imported_it_before_it_says_how(process: str) -> None:
    script = f"import sys, {process}; print([name for name in ('mlx_lm', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sizes_and_estimates_need_no_mlx() -> None:
    script = (
        "import sys, kvd.models.load, kvd.models.size, kvd.models.fingerprint, kvd.models.record, kvd.models.blas\n"
        "print([name for name in ('mlx', 'mlx_lm', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
