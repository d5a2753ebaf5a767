//! What the reference itself must hold: known values, derivatives, packing, rounding.

mod attention;
mod check;
mod dense;
