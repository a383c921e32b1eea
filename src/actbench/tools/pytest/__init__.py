"""Tests that train on a simulated card; ``actbench_pytest`` has the hooks that pytest calls."""
