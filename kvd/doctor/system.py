"""Checks of Python, packages, limits, memory, permissions, sockets and the service. None of them imports mlx."""

from __future__ import annotations

import os
import platform
import resource
import stat
from importlib import metadata

from kvclient import Client, __version__, paths
from kvclient.errors import KvdError, Unreachable
from kvd import machine
from kvd.config import Config
from kvd.doctor.disk import existing
from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.front.gate import NEEDED
from kvd.home import Home
from kvd.service.manager import Manager
from kvd.units import format_size

PACKAGES = ("kvd", "mlx", "mlx-lm", "pyzmq", "lmdb", "msgpack", "safetensors", "xxhash", "transformers")
ENOUGH_FILES = 1024
"""descriptors: one per client and a few per block being read or written"""


def python() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return ok("python", f"{platform.python_version()} on {system}")


def packages() -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return fail("packages", f"missing: {', '.join(missing)}", "install kvd again with its dependencies")
    return ok("packages", ", ".join(found))


def descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = soft if hard == resource.RLIM_INFINITY else hard
    shown = f"{soft} open files (raised to at most {'any' if hard == resource.RLIM_INFINITY else hard} at start)"
    if hard != resource.RLIM_INFINITY and reachable < NEEDED:
        return fail("limits", f"{shown}, kvd needs {NEEDED}", f"raise the hard limit: ulimit -Hn {ENOUGH_FILES * 8}")
    if hard != resource.RLIM_INFINITY and reachable < ENOUGH_FILES:
        return warn("limits", shown, f"raise the hard limit: ulimit -Hn {ENOUGH_FILES * 8}")
    return ok("limits", shown)


def socket(config: Config) -> Finding:
    size = len(os.fsencode(config.socket)) + len(paths.LONGEST_SUFFIX) + 1
    detail = f"{config.socket}: {size} of {paths.SOCKET_LIMIT} bytes"
    folder = config.socket.parent
    if folder.exists() and folder.stat().st_uid not in (os.geteuid(), 0):
        return fail("socket", f"{folder} belongs to another user", "set KVD_SOCKET or KVD_HOME to a folder of yours")
    return ok("socket", detail)


def permissions(home: Home) -> Finding:
    """The store holds users' prompts: nobody else may read it. What lies in a private home is private, whatever its own
    mode: `kvd config doc > kvd.toml` makes a file of 0644."""
    if not home.root.exists():
        above = existing(home.root)
        if not os.access(above, os.W_OK | os.X_OK):
            detail = f"{home.root} cannot be made: {above} is not writable"
            return fail("permissions", detail, "chown it to you, or set KVD_HOME")
        return ok("permissions", f"{home.root} does not exist yet; made with mode 0700 at first use")
    if not os.access(home.root, os.W_OK | os.X_OK):
        return fail("permissions", f"{home.root} is not writable", "chown it to you, or set KVD_HOME")
    private = [home.root, home.run, home.store, home.logs]
    if home.config.is_symlink():
        private.append(home.config)
    others = [path for path in private if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    if others:
        names = " ".join(f"'{path}'" for path in others)
        return warn("permissions", f"others can look into {others[0]}", f"chmod go= {names}")
    return ok("permissions", f"{home.root} is yours alone")


def memory(config: Config) -> Finding:
    total = machine.memory()
    limit = machine.budget(config.memory.limit, total)
    shown = f"{format_size(limit)} of {format_size(total)} for models and their KV"
    most = machine.usable(total)
    if limit > total:
        return warn("memory", shown, "set memory.limit below what the machine has, or leave it auto")
    if limit > most:
        fix = f"set memory.limit below {format_size(most)}, or let it keep more: sudo sysctl iogpu.wired_limit_mb=…"
        return warn("memory", f"{shown}, of which the GPU may keep {format_size(most)}", fix)
    return ok("memory", shown)


def service(manager: Manager) -> Finding:
    program = manager.program()
    if program is None:
        return ok("service", "not installed; `kvd install` starts the daemon at login")
    if not program.exists():
        return fail("service", f"{manager.file} starts {program}, which is gone", "run `kvd install` again")
    return ok("service", str(manager.file))


def daemon() -> list[Finding]:
    """The running daemon's own view: its version, and what its models reported at load."""
    try:
        with Client(autostart=False) as client:
            status = client.status()
    except Unreachable:
        return [ok("daemon", "not running; start it with `kvd start`")]
    except KvdError as problem:
        return [fail("daemon", problem.message, "restart it: kvd stop; kvd start")]
    version = str(status.get("version", "?"))
    found = [
        ok("daemon", f"version {version}, pid {status.get('pid', '?')}")
        if version == __version__
        else warn("daemon", f"runs version {version}, this is {__version__}", "restart it: kvd stop; kvd start")
    ]
    for model in status.get("models", []):
        for warning in model.get("warnings", []):
            found.append(warn(f"model {model['name']}", str(warning), "see `kvd logs --workers`"))
    return found
