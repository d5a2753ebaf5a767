//! What is fast: the backend trait and its CPU and CUDA implementations.
