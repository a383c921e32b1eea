"""``torch.compile`` with a memory budget for what it saves (He and Yu, MLSys 2023)."""
