"""Cases and runs on the nodes of a Ray cluster."""
