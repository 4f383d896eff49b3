"""What makes models fast on CPUs: fused layers, oneDNN, worker threads, the allocator."""
