"""Where the cost of attention is measured."""

FITTED_DEVICES = ("cpu", "cuda")
"""Types whose steps run at true shapes and can be measured here."""
