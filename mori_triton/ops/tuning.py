"""Launch shapes. Nothing here may change a result; kernels see only numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpLaunchConfig:
    """Launch shape of one half (dispatch or combine) of a round."""

    num_programs: int  # at most so many copying or reducing programs
    piece_bytes: int  # bytes of a row that a program moves at a time, a power of two
    route_tokens: int  # tokens of one routing program, a power of two
    num_warps: int  # a power of two


# the emulated device runs workgroups on a few host cores: few programs, short vectors
_EMULATED = EpLaunchConfig(num_programs=8, piece_bytes=2048, route_tokens=16, num_warps=2)
_GPU = EpLaunchConfig(num_programs=1024, piece_bytes=8192, route_tokens=16, num_warps=4)


def launch_config(device_type: str) -> EpLaunchConfig:
    """The launch shape for tensors of this `torch.device.type`."""
    return _EMULATED if device_type == "cpu" else _GPU
