"""Measures how fast a machine is, and writes a device profile for simulated times."""
