//! What is right: every op in f64, forward and backward, and its rounded twin.
