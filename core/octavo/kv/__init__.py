"""The paged cache: how blocks lie in memory, who owns them, and what of them can be reused."""
