"""The steps of a script: where they begin and end, what each allocates, by which line, and what it leaves."""
