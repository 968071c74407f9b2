"""Process groups, the canonical tree and the exchange of gradients. Knows tensors and ranks, no task."""
