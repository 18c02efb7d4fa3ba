"""What processes that own MLX are started with."""

from __future__ import annotations

import os
from pathlib import Path

from kvd.childenv import environment
from kvd.home import Home

HOME = Home(Path("/h"))


def test_one_core_is_left_to_others_unless_the_user_says_otherwise() -> None:
    made = environment({}, HOME, Path("/t"), None)
    assert made["OPENBLAS_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) - 1))
    assert environment({"OPENBLAS_NUM_THREADS": "7"}, HOME, Path("/t"), None)["OPENBLAS_NUM_THREADS"] == "7"


def test_the_library_to_preload_comes_before_what_is_preloaded_anyway() -> None:
    assert "LD_PRELOAD" not in environment({}, HOME, Path("/t"), None)
    assert environment({}, HOME, Path("/t"), Path("/b.so"))["LD_PRELOAD"] == "/b.so"
    assert environment({"LD_PRELOAD": "/x.so"}, HOME, Path("/t"), Path("/b.so"))["LD_PRELOAD"] == "/b.so:/x.so"
