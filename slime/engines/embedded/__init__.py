"""A small generation engine for a CPU or one GPU: continuous batching, shared prompt prefixes, live weight updates."""
