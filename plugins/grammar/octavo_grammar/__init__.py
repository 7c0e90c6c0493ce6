"""Grammars enforced with llguidance: JSON schemas, regular expressions, tool calls."""
