"""GPU support on top of `ops.kernels`: placed stores, batches made on the device, whole steps as CUDA graphs."""
