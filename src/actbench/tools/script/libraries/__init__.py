"""Libraries that a script imports, and what a simulated run changes in them."""
