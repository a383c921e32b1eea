"""The cell magic ``%%actbench`` of notebooks."""
