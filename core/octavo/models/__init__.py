"""Models: loading checkpoints, and the bridge from a transformers model to paged attention."""
