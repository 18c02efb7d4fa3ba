"""Measurements, each against a baseline taken in the same run. `tools/bench --list` names them."""
