"""Attention on example for octavo."""
