"""Activations that a model calls as functions: which there are, who calls them, and reaching them as the model runs."""

from actbench.nn.called.forward import CalledForward, StandIn, reach_calls, refuse_compiled_calls

__all__ = ["CalledForward", "StandIn", "reach_calls", "refuse_compiled_calls"]
