"""The engine: requests, their scheduling, and the steps that turn them into tokens."""
