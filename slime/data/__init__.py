"""Prompts in, batches out: data sets, the data source, batching, loss masks, debug dumps."""
