"""What ``actbench run`` says of a script: the verdict, tables of the peak, and what helps."""
