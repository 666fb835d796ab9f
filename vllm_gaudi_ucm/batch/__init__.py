"""A step as arrays: the table of live requests, and the plan of the batch. numpy only."""
