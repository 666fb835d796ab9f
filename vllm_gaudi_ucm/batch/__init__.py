"""Describes a step as arrays: the table of live requests, and the plan of the batch. Uses numpy only."""
