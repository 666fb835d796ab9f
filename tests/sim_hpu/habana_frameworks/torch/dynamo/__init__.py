"""torch.compile for the card."""
