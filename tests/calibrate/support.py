"""Results without a measurement, and a home with a tiny model."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.calibrate.result import Calibration, Gate, LayerCost, OneSided, Quality, Setting
from kvd.home import Home
from kvd.models.record import Record, write_record
from tests.tiny import tiny_model

GOOD = Quality(0.0004, 0.002, 0.99, 1.0003)
BAD = Quality(0.02, 0.2, 0.93, 1.01)


def setting(name: str, nbytes: int, quality: Quality) -> Setting:
    return Setting(name, nbytes, float(nbytes), quality, (5, 5), (4, 6), (5, 6), 0.9, 1_000_000, 1.5)


def calibration(**changes: Any) -> Calibration:
    same = Quality(0.0, 0.0, 1.0, 1.0)
    made = Calibration(
        model="demo", identity="abc", basis="b", tokens=8192, window=256, context=8192, text="a text", backend="cpu",
        dtype="float32", gate=Gate(), method="as it is done",
        settings=(setting("native", 46080, same), setting("k8v8", 12960, GOOD), setting("k4v4", 7200, BAD)),
        sides=(OneSided("k", 4, BAD), OneSided("v", 4, GOOD)),
        layers=(LayerCost(0, 0.001, 0.0005, 4), LayerCost(1, 0.004, 0.0002, 4)), best="k8v8",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@contextmanager
def tiny_home(**options: Any) -> Iterator[Home]:
    root = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    try:
        home = Home(root)
        home.create()
        tiny_model(home.models / "tiny", **options)
        write_record(home.models / "tiny", Record("tiny", "test", time.time()))
        yield home
    finally:
        shutil.rmtree(root, ignore_errors=True)
