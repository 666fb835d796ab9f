"""The plugin's figures on vLLM's /metrics: from the worker's process, where steps run, to the API server's.

Figures go through files, because vLLM's own way from worker to stat logger is `SchedulerStats`: only its declared
fields survive the message to the API server, its free ones belong to connectors, and it is sent with steps, so a
warm-up in idle gaps would not show. So the worker writes its counters to memory-mapped files in prometheus_client's
multi-process format (a store per value, no message, never behind), in a folder that both processes derive from the
engine's instance id; the stat logger (plugin group `vllm.stat_logger_plugins`) registers a collector that reads them at
each scrape.

Several API servers (`--api-server-count`) have a folder of that kind between them already (PROMETHEUS_MULTIPROC_DIR),
and answer only from its files, so the worker writes to it. Its files stay until vLLM removes the folder, because a
reader fails /metrics as a whole if a listed file is gone when it opens it.
"""
