"""Admission: which waiting requests begin."""
