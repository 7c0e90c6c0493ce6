"""The reference backend: pure PyTorch attention on any device, in any layout, that the others are compared with."""
