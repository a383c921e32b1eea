"""The card that a script sees: its memory, its sensors, and what reaches it outside of torch's operators."""
