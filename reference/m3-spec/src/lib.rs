//! What MiniMax-M3 is: configurations, rounding points, op specifications, seeded inputs, Philox and digests.

pub mod dtype;
