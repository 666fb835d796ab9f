"""Products with weights that stay quantised, by device."""
