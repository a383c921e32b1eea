"""Cases of a sweep on the nodes of a Ray cluster."""
