"""Only the first pass of a size, and only on a GPU, may take the time of a compiler."""

from __future__ import annotations

from kvd.worker.compiling import COMPILE_S, Compiling


def test_the_first_pass_of_each_size_has_time():
    passes = Compiling(gpu=True)
    assert passes.extra_s("decode", 1) == COMPILE_S
    assert passes.extra_s("decode", 1) == 0
    assert [passes.extra_s("decode", rows) for rows in (2, 3, 4, 7, 8)] == [COMPILE_S, 0, COMPILE_S, 0, COMPILE_S]
    assert passes.extra_s("prefill", 8) == COMPILE_S


def test_nothing_is_compiled_on_a_cpu():
    assert Compiling(gpu=False).extra_s("decode", 8) == 0
