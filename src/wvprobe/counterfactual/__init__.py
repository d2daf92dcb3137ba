"""Rewrites of a real model: what its heads, their number and their even split are worth."""

__all__: list[str] = []
