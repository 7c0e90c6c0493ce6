"""Traces of octavo's requests, by OpenTelemetry."""
