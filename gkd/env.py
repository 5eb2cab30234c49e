"""The environment variables of gkd: all of them, read where a device is opened and nowhere else."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gkd.errors import EnvError

_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variables say, checked."""

    cache_dir: Path | None
    """GKD_CACHE_DIR: where compiled kernels are kept; `off` is None. Default: gkd-engines in the user's cache."""
    assert_cached: bool
    """GKD_ASSERT_CACHED=1: a kernel that would have to be compiled is an error, which proves a cache complete."""
    sync: bool
    """GKD_SYNC=1: wait for each launch, so that a fault names its kernel. Slow."""
    gpu_device: int | None
    """GKD_GPU_DEVICE: the ordinal of the GPU that is used where the caller names none; None if unset."""


def read_env(variables: Mapping[str, str] = os.environ) -> Environment:
    """The variables as they are now. Raises EnvError for a value that means nothing; an empty one counts as unset."""
    return Environment(
        cache_dir=_cache_dir(variables),
        assert_cached=_switch(variables, "GKD_ASSERT_CACHED"),
        sync=_switch(variables, "GKD_SYNC"),
        gpu_device=_ordinal(variables, "GKD_GPU_DEVICE"),
    )


def _cache_dir(variables: Mapping[str, str]) -> Path | None:
    value = variables.get("GKD_CACHE_DIR", "")
    if value == "off":
        return None
    if value:
        return Path(value).absolute()
    user_cache = variables.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute counts as unset.
    if os.path.isabs(user_cache):
        return Path(user_cache) / "gkd-engines"
    try:
        return Path.home() / ".cache" / "gkd-engines"
    except RuntimeError:  # a user without a home, as some containers have
        return None


def _switch(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "")
    if value not in _SWITCH:
        raise EnvError(f"{name}: expected 0 or 1, got `{value}`; set one of them or unset it")
    return _SWITCH[value]


def _ordinal(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    if not value:
        return None
    # isdecimal alone takes digits of every script.
    if not (value.isascii() and value.isdecimal()):
        raise EnvError(f"{name}: expected the ordinal of a GPU, 0 or more, got `{value}`; set one or unset it")
    return int(value)
