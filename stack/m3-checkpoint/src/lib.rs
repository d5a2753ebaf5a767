//! Released MiniMax-M3 checkpoints, memory-mapped, a tensor at a time.
