"""Processes that train together with a script, and those that it starts."""
