"""Code that several operations share on a Gaudi."""
