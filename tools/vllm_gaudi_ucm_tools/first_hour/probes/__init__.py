"""The probes, one file for each group. They run in a process of their own; `first_hour/catalogue.py` lists them."""
