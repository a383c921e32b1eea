"""Callbacks for trainers, which apply a scheme for one training run.

Each trainer has its own file, the only one that imports it::

    from actbench.conversion.trainers.huggingface import ActbenchCallback
    from actbench.conversion.trainers.lightning import ActbenchCallback
"""
