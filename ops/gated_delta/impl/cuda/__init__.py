"""The gated delta rule on a GPU."""
