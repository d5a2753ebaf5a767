//! What the reference itself must hold: known values, derivatives, packing, rounding.

mod attention;
mod check;
mod dense;
mod golden;
mod head;
mod layers;
mod moe;
mod selection;
mod sparse;
mod training;
mod twin;
