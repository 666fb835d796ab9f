"""The doctor's checks: one file per section, each a function that yields `Check` rows."""
