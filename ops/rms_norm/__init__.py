"""RMSNorm of rows, with the addition of a residual before it."""
