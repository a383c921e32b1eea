"""The speed of the operators: seconds and bytes a second, beside a copy and beside the exact operator.

``actbench.measuring.kernels.measure`` (which imports torch) measures; the records and their table need no torch.
"""
