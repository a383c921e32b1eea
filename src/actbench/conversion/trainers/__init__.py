"""Callbacks for trainers, which put a scheme around a training run and take it off again.

Each trainer has a file of its own, which alone imports it::

    from actbench.conversion.trainers.huggingface import ActbenchCallback
    from actbench.conversion.trainers.lightning import ActbenchCallback
"""
