"""What `import torch` calls in the end, through the entry point `torch.backends`."""

import importlib


def load() -> None:
    """Imports the bridge, unless it is what imports torch."""
    importlib.import_module("habana_frameworks.torch")
