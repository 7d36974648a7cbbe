"""Devices without Lightning: NVML, the choice of GPUs, memory and the environment."""
