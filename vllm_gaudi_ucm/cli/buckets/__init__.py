"""Commands around buckets: phases, trace, tune, plan and plot."""
