"""Paged attention in Triton: kernels that know no device, for backends of the devices that Triton compiles for."""
