"""Activations that a model calls as functions: the functions, the modules that call them, and their interception."""

from actbench.methods.fewbit.called.forward import CalledForward, StandIn, reach_calls, refuse_compiled_calls

__all__ = ["CalledForward", "StandIn", "reach_calls", "refuse_compiled_calls"]
