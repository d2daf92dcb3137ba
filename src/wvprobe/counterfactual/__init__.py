"""Rewrites of a real model, and small ones from scratch: what heads, their number and split do."""

from wvprobe.counterfactual._biases import BiasResult, Difference, compare_biases

__all__ = ["BiasResult", "Difference", "compare_biases"]
