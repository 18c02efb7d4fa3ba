"""Check this machine and say what to fix.

Backend and BLAS (by a timed product), disk speed, free space, limits, memory, permissions, the socket's path, versions,
the installed service and the running daemon. Exit code 0 unless something does not work: 65 if that is kvd.toml alone,
else 70.

  kvd doctor
  kvd doctor --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

from kvclient.errors import BadRequest
from kvd.cli.output import console, print_json
from kvd.config import Config, load
from kvd.doctor import compute, disk, models, system
from kvd.doctor.finding import Finding, Level, fail, ok
from kvd.home import Home
from kvd.service import manager

BROKEN = 70
_CONFIG = "configuration"
_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="findings: name, level, detail, fix")


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in checks():
        findings.append(finding)
        if not args.json:
            show(finding)
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        console().print(verdict(findings))
    return exit_code(findings)


def exit_code(findings: list[Finding]) -> int:
    fails = {finding.name for finding in findings if finding.level is Level.FAIL}
    return BROKEN if fails - {_CONFIG} else BadRequest.exit_code if fails else 0


def checks() -> Iterator[Finding]:
    """All of them, slowest last."""
    yield system.python()
    yield system.packages()
    yield system.descriptors()
    home = Home.default()
    yield from _read("permissions", lambda: [system.permissions(home)])
    try:
        config = load()
    except BadRequest as problem:
        yield fail(_CONFIG, problem.message, "correct it; `kvd config doc` lists every key")
    else:
        yield from _configured(config)
    yield from _read("service", lambda: [system.service(manager())])
    yield from system.daemon()
    yield from _read("backend", lambda: compute.backend(home))


def _configured(config: Config) -> Iterator[Finding]:
    yield ok(_CONFIG, str(config.file) if config.file.exists() else "defaults, there is no kvd.toml")
    yield from _read("socket", lambda: [system.socket(config)])
    yield system.memory(config)
    yield from _read("free space", lambda: [disk.space(config)])
    yield from _read("disk speed", lambda: [disk.speed(config)])
    yield from _read("models", lambda: models.models(config))


def _read(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check that may not look where it has to has found what is wrong."""
    try:
        return check()
    except OSError as problem:
        place, said = problem.filename, f"{problem.filename}: {problem.strerror}"
    except BadRequest as problem:
        place, said = problem.details.get("path"), problem.message
    return [fail(name, said, f"make {place or 'it'} readable: chown it to you, and chmod u+rwX")]


def show(finding: Finding) -> None:
    from rich.text import Text

    line = Text.assemble((f"{finding.level:<5}", _STYLE[finding.level]), f"{finding.name:<15}", finding.detail)
    console().print(line, soft_wrap=True)
    if finding.fix:
        console().print(Text(f"{'':<20}→ {finding.fix}", style="bold"), soft_wrap=True)


def verdict(findings: list[Finding]) -> str:
    fails = sum(finding.level is Level.FAIL for finding in findings)
    warns = sum(finding.level is Level.WARN for finding in findings)
    if fails:
        return f"{fails} to repair before kvd works, {warns} to improve"
    return f"kvd works here; {warns} to improve" if warns else "all good"
