"""The gated delta rule: a state that decays, and in which each row replaces the value of its key."""
