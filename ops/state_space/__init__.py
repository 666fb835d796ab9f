"""State-space layers (Mamba-2): a state that decays, and to which each row adds."""
