"""The fake card: torch's own CUDA dispatch, on a machine without one."""
