"""Values that a simulated run does not compute: what is known of them, and what is assumed."""
