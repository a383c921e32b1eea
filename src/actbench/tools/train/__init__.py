"""Training runs: data, the loop with its evaluations and checkpoints, and comparisons of schemes by accuracy."""
