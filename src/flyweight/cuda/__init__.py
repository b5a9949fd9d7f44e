"""The CUDA driver by ctypes: memory, copies and digests on a device."""
