"""Small parts of the bridge: the generation of the card, and the execution mode."""
