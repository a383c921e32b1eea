"""Callbacks for trainers, which apply a scheme for one training run.

Each trainer has its own file, the only one that imports it::

    from actbench.tools.trainers.huggingface import ActbenchCallback
    from actbench.tools.trainers.lightning import ActbenchCallback
"""
