"""Who works on a tensor: the C++ core where it lies in the CPU's memory, kernels elsewhere."""

from torch import Tensor


def runs_in_core(tensor: Tensor) -> bool:
    """Whether the core works on it. Then waiting for a value costs nothing; elsewhere nobody waits for one."""
    return tensor.device.type == "cpu"
