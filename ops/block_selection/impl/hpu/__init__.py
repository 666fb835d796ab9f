"""Block selection on a Gaudi: operators of Gaudi's software and torch's own."""
