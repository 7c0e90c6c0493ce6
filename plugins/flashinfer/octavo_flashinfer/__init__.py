"""FlashInfer's paged attention on NVIDIA GPUs, planned once a step and captured with it."""
