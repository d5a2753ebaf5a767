//! Whole runs, in one binary because each would compile the whole stack again.

mod parity;
mod training;
