"""Compute capabilities, and the names by which NVRTC knows them."""

from gkd.errors import DeviceError

# Capabilities (90 is 9.0) whose cubins CI compiles. Others from the first on are compiled at run time all the same.
SHIPPED_ARCHS = (75, 80, 86, 89, 90, 100, 120)

# From 9.0 on, the instructions of one generation's tensor cores exist only under its name with an `a`.
_FIRST_ARCH_SPECIFIC = 90


def arch_name(capability: int) -> str:
    """NVRTC's name of a compute capability: sm_80 for 80, sm_90a for 90. Raises DeviceError below 7.5."""
    oldest = SHIPPED_ARCHS[0]
    if capability < oldest:
        raise DeviceError(
            f"compute capability {capability // 10}.{capability % 10}: expected {oldest // 10}.{oldest % 10} or later; "
            "use another GPU, or the CPU with gpu=-1"
        )
    return f"sm_{capability}{'a' if capability >= _FIRST_ARCH_SPECIFIC else ''}"
