//! Operations with a row per token, and those that only sum over rows: values, refusals, and bits that depend on a row
//! alone.

mod bits;
mod faults;
mod lab;
mod refusals;
mod threads;
mod values;
